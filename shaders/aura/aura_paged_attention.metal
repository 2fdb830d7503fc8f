// Paged attention over codes, in tiles (tiles.h). All simdgroups share up to kDecodeRows query rows. Tiles of keys and
// values are dequantised from their pages into threadgroup memory, in f32. q is rotated like the keys, and o comes out
// rotated like the values (paged_rotate). With kExact, some tokens have exact rows of E, which are rotated when they
// are staged (exact_rows.h). Coded keys may have means, one vector per 128 tokens. The means of a staged tile (two at
// most) are rotated into threadgroup memory, and are added to the keys when these are staged.
// Layout: q and out [T, HQ, D], codes [blocks, block_size, HK, words], norms [blocks, block_size, HK] f16, means
// [blocks, block_size / 128, HK, D] f16, exact rows [slots, rows, HK, D], new rows [T, HK, D], all with strides;
// partials as in output.h.
#include "attention/tiles.h"
#include "aura/codes.h"
#include "aura/pages.h"
#include "aura/ring_buffer.h"

template <int key_code, int value_code, int D, int kThreads, typename E, bool kExact>
struct CodedPages {
  device const uint* key_codes;
  device const half* key_norms;
  device const uint* value_codes;
  device const half* value_norms;
  threadgroup const float* key_table;
  threadgroup const float* value_table;
  threadgroup int64_t* offsets;  // of keys, then of values, then of the keys' means
  threadgroup float* norms;      // of keys, then of values
  device const half* tile_means;
  device const float* signs;         // of keys
  threadgroup float* rotated_means;  // the means of the tile's first key and of its last key
  uint simdgroup;
  constant AuraPagedParameters* parameters;
  enum { kKeys = keys_of_tile<float, D>() };
  ExactTokens<kExact, E, D, kKeys, kThreads> exact;

  METAL_FUNC void report(int sequence) const {
    if constexpr (kExact) exact.report(sequence);
  }
  METAL_FUNC void locate(KeyPlace place, PagedSequence sequence, int position, int kv_head, int key) const {
    if (parameters->has_tile_means != 0) {
      const KeyPlace mean_place{place.block, place.offset / kTokensOfTile};
      offsets[2 * kKeys + key] = offset_of(parameters->key_tile_means, mean_place, kv_head);
    }
    if constexpr (kExact) {
      if (exact.locate(sequence, position, kv_head, key, offsets)) return;
    }
    offsets[key] = offset_of(parameters->paged.key, place, kv_head);
    offsets[kKeys + key] = offset_of(parameters->paged.value, place, kv_head);
    norms[key] = float(key_norms[offset_of(parameters->key_norms, place, kv_head)]);
    norms[kKeys + key] = float(value_norms[offset_of(parameters->value_norms, place, kv_head)]);
  }
  METAL_FUNC void stage_keys(threadgroup float* tile, uint thread_index) const {
    if (parameters->has_tile_means != 0) {
      rotate_means(thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    stage<key_code, true>(tile, key_codes, offsets, norms, key_table, thread_index);
    if constexpr (kExact) exact.stage_keys(tile, offsets, thread_index);
  }
  METAL_FUNC void stage_values(threadgroup float* tile, uint thread_index) const {
    stage<value_code, false>(tile, value_codes, offsets + kKeys, norms + kKeys, value_table, thread_index);
    if constexpr (kExact) exact.stage_values(tile, offsets, thread_index);
  }

  // lanes_of(D) lanes of a simdgroup rotate one mean. The keys of a staged tile have one mean or two.
  METAL_FUNC void rotate_means(uint thread_index) const {
    static_assert(kKeys <= kTokensOfTile, "staged keys have at most two means");
    constexpr int kMeans = 32 / lanes_of(D);  // means per simdgroup
    constexpr int kOwn = D / lanes_of(D);
    const uint lane = thread_index % 32;
    const float factor = 1.0f / sqrt(float(D));
    const int count = simd_any(offsets[2 * kKeys] != offsets[3 * kKeys - 1]) ? 2 : 1;
    for (int first = int(simdgroup) * kMeans; first < count; first += kThreads / 32 * kMeans) {
      const int wanted = first + int(lane) / lanes_of(D);
      const int index = min(wanted, count - 1);
      device const half* mean = tile_means + offsets[2 * kKeys + index * (kKeys - 1)];
      float own[kOwn];
      UNROLL for (int i = 0; i < kOwn; ++i) own[i] = float(mean[place_of<D>(i, lane)]);
      rotate<D, false>(own, signs, lane);
      UNROLL for (int i = 0; i < kOwn; ++i) {
        if (wanted < count) rotated_means[index * D + place_of<D>(i, lane)] = own[i] * factor;
      }
    }
  }

  template <int code, bool kOfKeys>
  METAL_FUNC void stage(
      threadgroup float* tile,
      device const uint* codes,
      threadgroup const int64_t* places,
      threadgroup const float* factors,
      threadgroup const float* table,
      uint thread_index) const {
    constexpr int kLanes = lanes_of_row(D);
    static_assert(kKeys * kLanes % kThreads == 0, "whole simdgroups stage");
    for (int first = 0; first < kKeys * kLanes; first += kThreads) {
      const int item = first + int(thread_index);
      const int key = item / kLanes;
      const int column = item % kLanes * 8;
      bool loads = column < D;
      if constexpr (kExact) loads = loads && exact.sources[key] == kFromCodes;
      float4 centroids[2];
      decode_eight(shared_eight<code, D, D>(codes + places[key], 0, loads, thread_index % 32), table, centroids);
      threadgroup float* target = tile + key * tile_stride<float>(D) + column;
      float4 mean[2] = {float4(0.0f), float4(0.0f)};
      if (kOfKeys && loads && parameters->has_tile_means != 0) {
        threadgroup const float* own =
            rotated_means + (offsets[2 * kKeys + key] == offsets[2 * kKeys] ? 0 : D) + column;
        UNROLL for (int i = 0; i < 2; ++i) mean[i] = *(threadgroup const float4*)(own + i * 4);
      }
      UNROLL for (int i = 0; i < 2; ++i) {
        if (loads) *(threadgroup float4*)(target + i * 4) = factors[key] * centroids[i] + mean[i];
      }
    }
  }
};

template <int key_code, int value_code, int D, int kRows, typename E = float, bool kExact = false>
[[kernel]] void aura_paged_attention(
    device const float* q [[buffer(0)]],
    device const uint* key_codes [[buffer(1)]],
    device const half* key_norms [[buffer(2)]],
    device const float* key_codebook [[buffer(3)]],
    device const uint* value_codes [[buffer(4)]],
    device const half* value_norms [[buffer(5)]],
    device const float* value_codebook [[buffer(6)]],
    device const int* block_table [[buffer(7)]],
    device const int* cu_seqlens [[buffer(8)]],
    device const int* seq_lens [[buffer(9)]],
    device const float* sinks [[buffer(10)]],
    device float* out [[buffer(11)]],
    device float* o_partials [[buffer(12)]],
    device float* m_partials [[buffer(13)]],
    device float* l_partials [[buffer(14)]],
    device ErrorLog* errors [[buffer(15)]],
    constant AuraPagedParameters& parameters [[buffer(16)]],
    device const E* exact_keys [[buffer(17)]],
    device const E* exact_values [[buffer(18)]],
    device const int* exact_slots [[buffer(19)]],
    device const int* exact_starts [[buffer(20)]],
    device const int* exact_sink_slots [[buffer(21)]],
    device const E* new_keys [[buffer(22)]],
    device const E* new_values [[buffer(23)]],
    device const float* key_signs [[buffer(24)]],
    device const float* value_signs [[buffer(25)]],
    device const half* key_tile_means [[buffer(26)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int kSharing = kRows > kDecodeRows ? 1 : simdgroups_of(kRows, D);
  constexpr int kThreads = simdgroups_of(kRows, D) * 32;
  constexpr int kKeys = keys_of_tile<float, D>();
  alignas(16) threadgroup float tile[size_of_tile<float, D>()];
  threadgroup int64_t offsets[3 * kKeys];
  alignas(16) threadgroup float rotated_means[2 * D];
  threadgroup float norms[2 * kKeys];
  threadgroup float key_table[entries_of(key_code)];
  threadgroup float value_table[entries_of(value_code)];
  stage_table(key_table, key_codebook, entries_of(key_code), thread_index, kThreads);
  stage_table(value_table, value_codebook, entries_of(value_code), thread_index, kThreads);
  threadgroup int sources[kExact ? kKeys : 1];
  CodedPages<key_code, value_code, D, kThreads, E, kExact> pages{
      key_codes, key_norms,      value_codes, value_norms,   key_table, value_table, offsets,
      norms,     key_tile_means, key_signs,   rotated_means, simdgroup, &parameters, {}};
  if constexpr (kExact) {
    pages.exact = {exact_keys,           exact_values,      new_keys,  new_values,  exact_slots,
                   exact_starts,         exact_sink_slots,  key_signs, value_signs, errors,
                   &parameters.paged.op, &parameters.exact, sources,   simdgroup};
  }
  threadgroup float2 exchange[size_of_exchange<D, kSharing>()];
  attend<float, D, kSharing>(
      q, block_table, {cu_seqlens, seq_lens}, {out, {o_partials, m_partials, l_partials}, sinks}, errors,
      parameters.paged, pages, tile, exchange, group, thread_index, lane, simdgroup);
}
