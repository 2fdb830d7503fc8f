// One threadgroup owns a tile of query rows of one KV head, 8 per simdgroup. It walks the keys that any of these rows
// sees. It reads them from their pages into threadgroup memory for all rows, one tile at a time. If a sequence has at
// most one tile of rows, several threadgroups may split its keys. Registers hold q, scores [keys, 8] and o [D, 8].
// Layout: q and out [T, HQ, D], caches [blocks, block_size, HK, D], all with strides; partials as in output.h.
#include "attention/paged_attention.h"
#include "attention/tiles.h"

template <typename C, int D, int kThreads>
struct PlainPages {
  device const C* key_cache;
  device const C* value_cache;
  threadgroup int64_t* key_offsets;
  threadgroup int64_t* value_offsets;
  constant PagedParameters* parameters;

  METAL_FUNC void report(int) const {}
  METAL_FUNC void locate(KeyPlace place, PagedSequence, int, int kv_head, int key) const {
    key_offsets[key] = offset_of(parameters->key, place, kv_head);
    value_offsets[key] = offset_of(parameters->value, place, kv_head);
  }
  METAL_FUNC void stage_keys(threadgroup C* tile, uint thread_index) const {
    stage(tile, key_cache, key_offsets, thread_index);
  }
  METAL_FUNC void stage_values(threadgroup C* tile, uint thread_index) const {
    stage(tile, value_cache, value_offsets, thread_index);
  }

  METAL_FUNC void stage(
      threadgroup C* tile, device const C* cache, threadgroup const int64_t* offsets, uint thread_index) const {
    constexpr int kVectors = D / 4;
    for (int item = int(thread_index); item < keys_of_tile<C, D>() * kVectors; item += kThreads) {
      const int key = item / kVectors;
      const int column = item % kVectors * 4;
      device const C* source = cache + offsets[key] + column;
      vec<C, 4> values;
      if (parameters->has_vectors != 0) {
        values = *(device const vec<C, 4>*)source;
      } else {
        values = vec<C, 4>(source[0], source[1], source[2], source[3]);
      }
      *(threadgroup vec<C, 4>*)(tile + key * tile_stride<C>(D) + column) = values;
    }
  }
};

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
  alignas(16) threadgroup C tile[size_of_tile<C, D>()];
  threadgroup int64_t key_offsets[keys_of_tile<C, D>()];
  threadgroup int64_t value_offsets[keys_of_tile<C, D>()];
  const PlainPages<C, D, kSimdgroups * 32> pages{key_cache, value_cache, key_offsets, value_offsets, &parameters};
  threadgroup float2 exchange[size_of_exchange<D, 1>()];
  attend<C, D, 1>(
      q, block_table, {cu_seqlens, seq_lens}, {out, {o_partials, m_partials, l_partials}, sinks}, errors, parameters,
      pages, tile, exchange, group, thread_index, lane, simdgroup);
}
