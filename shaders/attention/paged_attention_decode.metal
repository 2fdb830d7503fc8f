// The kernel for sequences with up to 8 query rows per KV head. One threadgroup owns the rows of one KV head and one
// split of the sequence's keys. Its 4 simdgroups take turns, 32 keys at a time. Each has its own softmax, and they are
// merged at the end. Registers hold scores [32, 8] and o [D, 8]. Keys and values go from their pages straight into
// products, and each byte is read once.
// Layout: q and out [T, HQ, D], caches [blocks, block_size, HK, D], all with strides; partials as in output.h.
#include "attention/output.h"
#include "attention/paged_attention.h"

GDN_CONSTANT int kDecodeKeys = kKeysOfRound / kDecodeSimdgroups;
GDN_CONSTANT int kDecodeBlocks = kDecodeKeys / 8;

template <typename T, typename C, int D>
[[kernel]] void paged_attention_decode(
    device const T* q [[buffer(0)]],
    device const C* key_cache [[buffer(1)]],
    device const C* value_cache [[buffer(2)]],
    device const int* block_table [[buffer(3)]],
    device const int* cu_seqlens [[buffer(4)]],
    device const int* seq_lens [[buffer(5)]],
    device const float* sinks [[buffer(6)]],
    device T* out [[buffer(7)]],
    device float* o_partials [[buffer(8)]],
    device float* m_partials [[buffer(9)]],
    device float* l_partials [[buffer(10)]],
    device ErrorLog* errors [[buffer(11)]],
    constant PagedParameters& parameters [[buffer(12)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(D % 16 == 0 && D <= 256, "a vector is whole pairs of fragments");
  threadgroup int64_t key_offsets[kKeysOfRound];
  threadgroup int64_t value_offsets[kKeysOfRound];
  threadgroup float2 shared[D * 4 + kDecodeSimdgroups * 8];
  const int split = int(group.x);
  const int kv_head = int(group.y);
  if (split == 0 && kv_head == 0 && thread_index == 0) {
    report_sequence({cu_seqlens, seq_lens}, parameters, int(group.z), errors);
  }
  RowTile tile{paged_sequence({cu_seqlens, seq_lens}, parameters, int(group.z), lane), 0, 0};
  tile.rows = min(rows_of(parameters, tile.sequence.queries), kDecodeRows);
  if (tile.rows == 0) return;
  KeyRange range = seen_by_tile(parameters, tile);
  const int splits = splits_of(parameters, tile, range);
  if (split >= splits) return;
  range = range_of_split(parameters, range, splits, split);

  const LanePosition at = lane_position(lane);
  stage_rows<D, kDecodeSimdgroups>(
      shared, query_rows(q, parameters, tile, kv_head, at.column, at.row), simdgroup, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const StagedQuery query{shared, lane};
  const SeenKeys seen = seen_by_lane(parameters, tile, at.column);

  RowState state = no_keys();
  float2 o[D / 8];
  UNROLL for (int part = 0; part < D / 8; ++part) o[part] = float2(0.0f);
  threadgroup int64_t* own_keys = key_offsets + int(simdgroup) * kDecodeKeys;
  threadgroup int64_t* own_values = value_offsets + int(simdgroup) * kDecodeKeys;
  for (int round = range.first; round < range.last; round += kKeysOfRound) {
    const int first = round + int(simdgroup) * kDecodeKeys;  // may lie past the last key; the weight is then 0
    const KeyPlace place =
        key_place(block_table, parameters, tile.sequence.index, min(first + int(lane), range.last - 1), errors);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    own_keys[lane] = offset_of(parameters.key, place, kv_head);
    own_values[lane] = offset_of(parameters.value, place, kv_head);
    simdgroup_barrier(mem_flags::mem_threadgroup);

    const PagedRows<C> keys{key_cache, own_keys, parameters.has_vectors != 0};
    float2 scores[kDecodeBlocks];
    multiply_keys<D, kDecodeBlocks>(scores, keys, query, at);
    const ScaledKeys scaled{parameters.scale};
    const float2 rescale = online_softmax<kDecodeBlocks>(scores, state, scaled, first + at.row, seen);
    UNROLL for (int part = 0; part < D / 8; ++part) o[part] *= rescale;

    const PagedRows<C> values{value_cache, own_values, parameters.has_vectors != 0};
    multiply_values<D, kDecodeBlocks>(o, scores, values, at);
  }
  merge_simdgroups<D, kDecodeSimdgroups, D * 4>(o, state, shared, at, simdgroup, lane);
  if (simdgroup > 0) return;
  store_rows<D>(
      o, state, Output<T>{out, {o_partials, m_partials, l_partials}, sinks}, parameters, tile, kv_head, at.column,
      splits, split, at.row);
}
