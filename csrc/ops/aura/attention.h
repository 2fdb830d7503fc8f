// Attention to codes, in two passes and end to end.
#pragma once
#include "ops/aura/aura.h"

namespace torch_gdn {

// The results of each block, in float32. o [B, HQ, L, NB, D] is rotated, and not divided by l. m and l are [B, HQ, L,
// NB]. m is the largest score, and l is the sum of exp(score - m). Inside aura_attention, NX blocks of exact rows
// follow, whose o is not rotated.
using Partials = std::tuple<Tensor, Tensor, Tensor>;

// Pass 1 of attention to codes handles each block of keys by itself.
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

// Pass 2 of attention to codes merges the blocks and rotates the result back.
template <typename Int>
struct AuraFlashP2 {
  static constexpr const char* kSchema =
      "aura_flash_p2(Tensor o_partials, Tensor m_partials, Tensor l_partials, Tensor value_signs, "
      "Tensor? sinks=None, ScalarType? dtype=None) -> Tensor";

  Tensor o_partials, m_partials, l_partials, value_signs;
  optional<Tensor> sinks;
  optional<at::ScalarType> dtype;

  AuraShape<Int> shape;

  auto arguments() { return std::tie(o_partials, m_partials, l_partials, value_signs, sinks, dtype); }

  void check(const char* op) {
    const Check<Int> check(op, "o_partials", o_partials);
    check.is_float32("o_partials", o_partials).dimensions(5, "[B, HQ, L, NB, D]");
    auto& s = shape;
    s.B = size_of<Int>(o_partials, 0), s.HQ = size_of<Int>(o_partials, 1), s.L = size_of<Int>(o_partials, 2);
    s.NB = size_of<Int>(o_partials, 3);
    s.D = check_head_size(check, "o_partials", size_of<Int>(o_partials, 4));
    check_rows(check, "m_partials", m_partials);
    check_rows(check, "l_partials", l_partials);
    check_table(check, "value_signs", value_signs, "[D]", s.D);
    if (sinks.has_value()) check_table(check, "sinks", *sinks, "[HQ]", s.HQ);
    check.is_activation("dtype", dtype.value_or(at::kFloat));
  }

  Tensor outputs() const {
    return empty<Int>({shape.B, shape.HQ, shape.L, shape.D}, o_partials.options().dtype(dtype.value_or(at::kFloat)));
  }

 private:
  void check_rows(const Check<Int>& check, const char* argument, const Tensor& x) const {
    check.is_float32(argument, x).shape("[B, HQ, L, NB]", {shape.B, shape.HQ, shape.L, shape.NB});
  }
};

// Attention to codes, end to end: rotates q, then runs passes 1 and 2.
template <typename Int>
struct AuraAttention : CachedAttention<Int> {
  static constexpr const char* kSchema =
      "aura_attention(Tensor q, Tensor key_codes, Tensor key_norms, Tensor key_codebook, Tensor key_signs, "
      "Tensor value_codes, Tensor value_norms, Tensor value_codebook, Tensor value_signs, Tensor? starts=None, "
      "Tensor? sinks=None, float? scale=None, bool causal=True, SymInt? q_offset=None, int window=0, "
      "SymInt? block_size=None, SymInt? length=None, Tensor? exact_keys=None, Tensor? exact_values=None, "
      "SymInt exact_sinks=0, SymInt? exact_length=None, Tensor? key_tile_means=None) -> Tensor";

  Tensor q, key_signs, value_signs;
  optional<Tensor> sinks;
  optional<double> scale;
  optional<Int> block_size, length;
  ExactRows<Int> exact;

  auto arguments() {
    auto& [starts, causal, q_offset, window] = this->visibility;
    return std::tie(q, this->key.codes, this->key.norms, this->key.codebook, key_signs, this->value.codes,
                    this->value.norms, this->value.codebook, value_signs, starts, sinks, scale, causal, q_offset,
                    window, block_size, length, exact.keys, exact.values, exact.sinks, exact.length,
                    this->key.tile_means);
  }

  void check(const char* op) {
    const Check<Int> check(op, "q", q);
    check.is_activation("q", q);
    this->check_cache(check, "q", q, length, exact);
    check_table(check, "key_signs", key_signs, "[D]", this->shape.D);
    check_table(check, "value_signs", value_signs, "[D]", this->shape.D);
    if (sinks.has_value()) check_table(check, "sinks", *sinks, "[HQ]", this->shape.HQ);
    if (block_size.has_value()) check_block_size(check, *block_size);
  }

  Tensor outputs() const {
    const auto& s = this->shape;
    return empty<Int>({s.B, s.HQ, s.L, s.D}, q.options());
  }

  // The arguments are already checked. The partials have room for the blocks of exact rows, after those of codes.
  AuraFlashP1<Int> pass_1(const Tensor& q_rot, const optional<Tensor>& tile_scores, const Int& keys_of_block,
                          const Int& rows_of_block) const {
    AuraFlashP1<Int> pass{*this, q_rot, keys_of_block, tile_scores};
    pass.shape.NB = ceil_div(pass.shape.T, keys_of_block);
    pass.shape.NX = ceil_div(pass.shape.E, rows_of_block);
    return pass;
  }

  AuraFlashP2<Int> pass_2(const AuraFlashP1<Int>& pass_1, const Partials& partials) const {
    const auto& [o, m, l] = partials;
    return {o, m, l, value_signs, sinks, q.scalar_type(), pass_1.shape};
  }
};

// Returns the keys of a block, in whole tiles, for about `wanted` work items. A block has `groups` work items.
inline int64_t default_block_size(int64_t T, int64_t tile, int64_t groups, int64_t wanted) {
  const int64_t tiles = std::max<int64_t>(1, ceil_div(T, tile));
  const int64_t blocks = std::clamp<int64_t>(wanted / std::max<int64_t>(1, groups), 1, tiles);
  return ceil_div(tiles, blocks) * tile;
}

}  // namespace torch_gdn
