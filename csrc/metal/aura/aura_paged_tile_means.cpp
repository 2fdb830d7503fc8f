#include "ops/aura/aura_paged_tile_means.h"

#include "metal/attention/pages.h"
#include "metal/implement.h"
#include "shaders/aura/aura_paged_tile_means.h"

namespace torch_gdn {

namespace {

void run(const AuraPagedTileMeans<int64_t>& op) {
  const auto& s = op.shape;
  const int64_t channels = s.HK * s.D;
  // Without new tokens, the kernel still checks the sequences.
  const int64_t tiles = std::max<int64_t>(1, ceil_div(std::min(op.sequences.max_query_len, s.T), kTokensOfTile));
  if (s.N == 0 || channels == 0 || s.blocks == 0) return;
  const auto device = op.keys.device();
  const Tensor block_table = index_array(device, op.sequences.block_table);
  const Tensor cu_seqlens = index_array(device, op.sequences.cu_seqlens);
  const Tensor seq_lens = index_array(device, op.sequences.seq_lens);
  const Tensor slots = index_array(device, op.exact_slots), starts = index_array(device, op.exact_starts);
  int32_count(s.T, "aura_paged_tile_means_: keys", "tokens");
  int32_count(s.N, "aura_paged_tile_means_: seq_lens", "sequences");
  int32_count(s.table_blocks, "aura_paged_tile_means_: block_table", "blocks");
  PagedTileMeansParameters parameters{};
  set_sequences(parameters.paged, s, op.sequences, block_table, cu_seqlens, seq_lens);
  parameters.keys = token_strides(op.keys);
  parameters.tile_means = page_strides(op.tile_means);
  parameters.exact_keys = page_strides(op.exact_keys);
  parameters.slot = slots.stride(0);
  parameters.start = starts.stride(0);
  parameters.slot_bytes = int32_t(slots.element_size());
  parameters.start_bytes = int32_t(starts.element_size());
  parameters.slots = int32_t(std::min<int64_t>(op.exact_keys.size(0), INT32_MAX));
  parameters.ring = int32_t(op.exact_keys.size(1) - op.sinks);
  parameters.sinks = int32_t(op.sinks);
  parameters.tail = int32_t(op.tail);
  parameters.head_size = int32_t(s.D);
  int32_count(channels, "aura_paged_tile_means_: keys", "elements of a token");
  launcher().run({{"aura/aura_paged_tile_means",
                   {op.keys.scalar_type()},
                   {op.keys, op.exact_keys, slots, starts, block_table, cu_seqlens, seq_lens, op.tile_means,
                    Binding::error_log(), parameters},
                   {s.N, ceil_div(channels, kMeanThreads), tiles},
                   kMeanThreads}});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<AuraPagedTileMeans, &run>(m); }

}  // namespace torch_gdn
