// One threadgroup owns a tile of query rows of one KV head, 8 a simdgroup, and walks the keys that any of them sees, a
// tile at a time, which it reads from their pages into threadgroup memory for all rows. A sequence with no more rows
// than a tile may have its keys divided among threadgroups. In registers: q, scores [keys, 8], o [D, 8].
// Layout: q and out [T, HQ, D], caches [blocks, block_size, HK, D], all with strides; partials as output.h has them.
#include "attention/output.h"
#include "attention/paged_attention_prefill.h"
#include "core/tile.h"

// Keys of a tile, so that 8 of its rows more would still fit.
template <typename C, int D>
METAL_FUNC constexpr int keys_of_tile() {
  return D * int(sizeof(C)) > 512 ? 16 : 32;
}

// Rows of a page each, `offsets` elements into the cache.
template <int D, int kKeys, int kThreads, typename C>
METAL_FUNC void stage_keys(
    threadgroup C* tile,
    device const C* cache,
    threadgroup const int64_t* offsets,
    bool has_vectors,
    uint thread_index) {
  constexpr int kVectors = D / 4;
  for (int item = int(thread_index); item < kKeys * kVectors; item += kThreads) {
    const int key = item / kVectors;
    const int column = item % kVectors * 4;
    device const C* source = cache + offsets[key] + column;
    vec<C, 4> values;
    if (has_vectors) {
      values = *(device const vec<C, 4>*)source;
    } else {
      values = vec<C, 4>(source[0], source[1], source[2], source[3]);
    }
    *(threadgroup vec<C, 4>*)(tile + key * tile_stride<C>(D) + column) = values;
  }
}

template <typename T, typename C, int D, int kSimdgroups>
[[kernel]] void paged_attention_prefill(
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
  constexpr int kThreads = kSimdgroups * 32;
  constexpr int kKeys = keys_of_tile<C, D>();
  constexpr int kBlocks = kKeys / 8;
  constexpr int kStride = tile_stride<C>(D);
  alignas(16) threadgroup C tile_of_keys[kKeys * kStride];
  threadgroup int64_t key_offsets[kKeys];
  threadgroup int64_t value_offsets[kKeys];
  const int kv_head = int(group.y);
  const int split = int(group.z);
  if (int(group.x) < parameters.sequences && split == 0 && kv_head == 0 && thread_index == 0) {
    report_sequence(cu_seqlens, seq_lens, parameters, int(group.x), errors);
  }
  const RowTile tile = locate_tile(cu_seqlens, seq_lens, parameters, int(group.x), lane);
  if (tile.rows == 0) return;
  const KeyRange whole = seen_by_tile(parameters, tile);
  const int splits = splits_of(parameters, tile, whole);
  if (split >= splits) return;
  const KeyRange range = range_of_split(parameters, whole, splits, split);

  const LanePosition at = lane_position(lane);
  const int own_row = int(simdgroup) * kPrefillRows + at.column;
  HeldQuery<T, D> query;
  query.load(query_rows(q, parameters, tile, kv_head, own_row, at.row));
  const SeenKeys seen = seen_by_lane(parameters, tile, own_row);
  const bool has_vectors = parameters.has_vectors != 0;

  StagedRows<C, kStride> staged;
  staged.tile = tile_of_keys;
  RowState state = no_keys();
  float2 o[D / 8];
  UNROLL for (int part = 0; part < D / 8; ++part) o[part] = float2(0.0f);
  for (int first = range.first; first < range.last; first += kKeys) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (int(thread_index) < kKeys) {
      const KeyPlace place = key_place(
          block_table, parameters, tile.sequence.index, min(first + int(thread_index), range.last - 1), errors);
      key_offsets[thread_index] = offset_of(parameters.key, place, kv_head);
      value_offsets[thread_index] = offset_of(parameters.value, place, kv_head);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_keys<D, kKeys, kThreads>(tile_of_keys, key_cache, key_offsets, has_vectors, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float2 scores[kBlocks];
    multiply_keys<D, kBlocks>(scores, staged, query, at);
    const float2 decay = online_softmax<kBlocks>(scores, state, parameters.scale, first + at.row, seen);
    UNROLL for (int part = 0; part < D / 8; ++part) o[part] *= decay;

    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_keys<D, kKeys, kThreads>(tile_of_keys, value_cache, value_offsets, has_vectors, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply_values<D, kBlocks>(o, scores, staged, at);
  }
  store_rows<D>(
      o, state, out, o_partials, m_partials, l_partials, sinks, parameters, tile, kv_head, own_row, splits, split,
      at.row);
}
