// The launches of aura_attention. Each kernel is also an op, except those for exact rows and for means of tiles.
#pragma once
#include "launch/launch.h"
#include "metal/parameters.h"
#include "ops/aura/aura_attention.h"
#include "ops/aura/aura_rotate.h"

namespace torch_gdn {

// Sets what shaders/aura/visibility.h's row_place reads, and the number of a KV head's query rows.
template <typename Parameters>
void set_query_rows(Parameters& parameters, const AuraShape<>& s) {
  const int64_t ratio = s.HQ / s.HK;
  parameters.kv_heads = int32_t(s.HK);
  parameters.ratio = int32_t(ratio);
  parameters.queries = int32_t(s.L);
  parameters.rows = int32_count(s.L * ratio, "aura_attention: q", "query rows of a KV head");
}

Launch launch_aura_rotate(const AuraRotate<int64_t>& op, const Tensor& y);

// scores [B, HQ, L, tiles] float32 are the products of op.q with the means of tiles, scaled.
Launch launch_aura_tile_scores(const AuraAttention<int64_t>& op, const Tensor& scores);

// Returns the query rows of a threadgroup of pass 1: 1, 2, 4, 8 or 32.
int64_t rows_of_threadgroup(const AuraShape<>& shape);
Launch launch_aura_flash_p1(const AuraFlashP1<int64_t>& op, const Partials& partials);

// Writes the last `shape.NX` blocks of the partials.
Launch launch_aura_flash_exact(const AuraAttention<int64_t>& op, const AuraShape<>& shape, int64_t block_size,
                               const Partials& partials);

Launch launch_aura_flash_p2(const AuraFlashP2<int64_t>& op, const Tensor& o);

}  // namespace torch_gdn
