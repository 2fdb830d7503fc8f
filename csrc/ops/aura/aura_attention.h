// Attention to codes, end to end: rotates q, then runs passes 1 and 2.
#pragma once
#include "ops/aura/aura_flash_p1.h"
#include "ops/aura/aura_flash_p2.h"

namespace torch_gdn {

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
