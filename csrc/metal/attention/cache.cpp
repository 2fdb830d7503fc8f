// Stores new tokens in the pages of a cache.
#include "ops/attention/cache.h"

#include "metal/attention/paged_attention.h"
#include "metal/implement.h"
#include "metal/layers/rows.h"
#include "shaders/attention/parameters.h"

namespace torch_gdn {

namespace {

// `argument` is its name in errors.
CacheSlotParameters slot_parameters(const CacheSlots<int64_t>& slots, const char* argument) {
  CacheSlotParameters parameters{};
  parameters.stride = slots.slot_mapping.stride(0);
  parameters.bytes = int32_t(slots.slot_mapping.element_size());
  parameters.tokens = int32_t(slots.tokens);
  parameters.capacity = int32_count(slots.blocks * slots.block_size, argument, "slots");
  parameters.block_size = int32_t(slots.block_size);
  parameters.key = page_strides(slots.key_cache);
  parameters.value = page_strides(slots.value_cache);
  return parameters;
}

void run(const ComputeSlotMapping<int64_t>& op) {
  const char* slots = "compute_slot_mapping_: slot_mapping";
  const auto device = op.positions.device();
  const Tensor cu_seqlens = index_array(device, op.cu_seqlens), block_table = index_array(device, op.block_table);
  SlotMappingParameters parameters{};
  parameters.table_sequence = block_table.stride(0);
  parameters.table_block = block_table.stride(1);
  parameters.position = op.positions.stride(0);
  parameters.boundary = cu_seqlens.stride(0);
  parameters.slot = op.slot_mapping.stride(0);
  parameters.table_bytes = int32_t(block_table.element_size());
  parameters.position_bytes = int32_t(op.positions.element_size());
  parameters.boundary_bytes = int32_t(cu_seqlens.element_size());
  parameters.slot_bytes = int32_t(op.slot_mapping.element_size());
  parameters.tokens = int32_t(op.T);
  parameters.slots = int32_count(op.slots, slots, "entries");
  parameters.sequences = int32_count(op.N, "compute_slot_mapping_: cu_seqlens", "sequences");
  parameters.table_tokens = int32_t(op.table_blocks * op.block_size);
  parameters.last_block = op.last_block();
  parameters.block_size = int32_t(op.block_size);
  parameters.op = op_name();
  const int64_t items = std::max(op.slots, op.N + 1);  // each thread also checks one boundary
  launcher().run({{"attention/compute_slot_mapping",
                   {kSlotThreads},
                   {op.positions, cu_seqlens, block_table, op.slot_mapping, Binding::error_log(), parameters},
                   {ceil_div(items, kSlotThreads), 1, 1},
                   kSlotThreads}});
}

void run(const ReshapeAndCache<int64_t>& op) {
  if (op.key_cache.numel() + op.value_cache.numel() == 0) return;
  int32_count(op.HK * std::max(op.D, op.DV), "reshape_and_cache_: key", "elements of a token");
  const Tensor key = unit_last_stride(op.key, "key"), value = unit_last_stride(op.value, "value");
  CacheParameters parameters{};
  parameters.key = token_strides(key);
  parameters.value = token_strides(value);
  parameters.slots = slot_parameters(op.slots, "reshape_and_cache_: key_cache");
  parameters.heads = int32_t(op.HK);
  parameters.key_size = int32_t(op.D);
  parameters.value_size = int32_t(op.DV);
  parameters.op = op_name();
  launcher().run(
      {{"attention/reshape_and_cache",
        {key.scalar_type(), op.key_cache.scalar_type(), vector_width({key, value, op.key_cache, op.value_cache})},
        {key, value, op.key_cache, op.value_cache, op.slot_mapping, Binding::error_log(), parameters},
        {op.slots.tokens, 1, 1},
        kCacheThreads}});
}

void run(const QkNormRopeAndCache<int64_t>& op, const Tensor& q_out) {
  if (op.q.numel() + op.k.numel() + op.v.numel() == 0) return;
  const char* q = "qk_norm_rope_and_cache_: q";
  const RotatedHeads in(op.heads, q);
  const Tensor v = as_rows(op.v, "v");
  QkNormRopeAndCacheParameters parameters{};
  parameters.heads = int32_t(in.q.size(2) + 2 * op.HK);
  parameters.rows = int32_count(op.heads.B * op.heads.T * parameters.heads, q, "rows");
  parameters.tokens = int32_t(op.heads.T);
  parameters.q_heads = int32_t(in.q.size(2));
  parameters.kv_heads = int32_t(op.HK);
  parameters.value_size = int32_count(op.DV, "qk_norm_rope_and_cache_: v", "elements in a row");
  parameters.q = row_strides(in.q), parameters.k = row_strides(in.k), parameters.v = row_strides(v);
  parameters.q_out = row_strides(q_out);
  parameters.rotation = in.rotation;
  parameters.slots = slot_parameters(op.slots, "qk_norm_rope_and_cache_: key_cache");
  parameters.op = op_name();
  const int width = std::min(in.width(), vector_width({v, op.key_cache, op.value_cache}));
  launcher().run({{"attention/qk_norm_rope_and_cache",
                   {in.q.scalar_type(), op.key_cache.scalar_type(), in.weight_type(), in.cos.scalar_type(), width},
                   {in.q, in.k, v, in.cos, in.sin, in.q_weight, in.k_weight, q_out, op.key_cache, op.value_cache,
                    op.slot_mapping, Binding::error_log(), parameters},
                   {ceil_div(parameters.rows, kRotatedRows), 1, 1},
                   32 * kRotatedRows}});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  metal::implement<ComputeSlotMapping, &run>(m);
  metal::implement<ReshapeAndCache, &run>(m);
  metal::implement<QkNormRopeAndCache, &run>(m);
}

}  // namespace torch_gdn
