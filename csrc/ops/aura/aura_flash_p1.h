// Pass 1 of attention to codes handles each block of keys by itself.
#pragma once
#include "ops/aura/aura.h"

namespace torch_gdn {

// The results of each block, in float32. o [B, HQ, L, NB, D] is rotated, and not divided by l. m and l are [B, HQ, L,
// NB]. m is the largest score, and l is the sum of exp(score - m). Inside aura_attention, NX blocks of exact rows
// follow, whose o is not rotated.
using Partials = std::tuple<Tensor, Tensor, Tensor>;

template <typename Int>
struct AuraFlashP1 : CachedAttention<Int> {
  static constexpr const char* kSchema =
      "aura_flash_p1(Tensor q_rot, Tensor key_codes, Tensor key_norms, Tensor key_codebook, Tensor value_codes, "
      "Tensor value_norms, Tensor value_codebook, Tensor? starts=None, bool causal=True, SymInt? q_offset=None, "
      "int window=0, SymInt block_size=64, Tensor? tile_scores=None) -> "
      "(Tensor o_partials, Tensor m_partials, Tensor l_partials)";

  Tensor q_rot;
  Int block_size;
  optional<Tensor> tile_scores;  // [B, HQ, L, tiles]: products of q with the means that were subtracted from keys

  auto arguments() {
    auto& [starts, causal, q_offset, window] = this->visibility;
    return std::tie(q_rot, this->key.codes, this->key.norms, this->key.codebook, this->value.codes, this->value.norms,
                    this->value.codebook, starts, causal, q_offset, window, block_size, tile_scores);
  }

  void check(const char* op) {
    const Check<Int> check(op, "q_rot", q_rot);
    check.is_float32("q_rot", q_rot);
    this->check_cache(check, "q_rot", q_rot);
    auto& s = this->shape;
    if (tile_scores.has_value()) {
      check.is_float32("tile_scores", *tile_scores).shape("[B, HQ, L, ceil(T / 128)]", {s.B, s.HQ, s.L, tiles_of(s.T)});
    }
    check_block_size(check, block_size);
    s.NB = ceil_div(s.T, block_size);
  }

  Partials partials(const at::TensorOptions& f32) const {
    const auto& s = this->shape;
    const Sizes<Int> rows = {s.B, s.HQ, s.L, s.NB + s.NX};
    return {empty<Int>(with_last(rows, s.D), f32), empty<Int>(rows, f32), empty<Int>(rows, f32)};
  }

  Partials outputs() const { return partials(q_rot.options()); }
};

}  // namespace torch_gdn
