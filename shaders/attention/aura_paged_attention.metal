// The prefill kernel of paged attention over codes: tiles of keys and values are dequantised from their pages into
// threadgroup memory, in f32. q is rotated as the keys are, and o comes out rotated as the values are (paged_rotate).
// Layout: q and out [T, HQ, D], codes [blocks, block_size, HK, words], norms [blocks, block_size, HK] f16, all
// with strides; partials as output.h has them.
#include "attention/aura_paged_attention.h"
#include "attention/tiles.h"
#include "aura/codes.h"

template <int key_bits, int value_bits, int D, int kThreads>
struct CodedPages {
  device const uint* key_codes;
  device const half* key_norms;
  device const uint* value_codes;
  device const half* value_norms;
  threadgroup const float* key_table;
  threadgroup const float* value_table;
  threadgroup int64_t* offsets;  // of keys, then of values
  threadgroup float* norms;      // likewise
  constant AuraPagedParameters* parameters;
  enum { kKeys = keys_of_tile<float, D>() };

  METAL_FUNC void locate(KeyPlace place, int kv_head, int key) const {
    offsets[key] = offset_of(parameters->paged.key, place, kv_head);
    offsets[kKeys + key] = offset_of(parameters->paged.value, place, kv_head);
    norms[key] = float(key_norms[offset_of(parameters->key_norms, place, kv_head)]);
    norms[kKeys + key] = float(value_norms[offset_of(parameters->value_norms, place, kv_head)]);
  }
  METAL_FUNC void stage_keys(threadgroup float* tile, uint thread_index) const {
    stage<key_bits>(tile, key_codes, offsets, norms, key_table, thread_index);
  }
  METAL_FUNC void stage_values(threadgroup float* tile, uint thread_index) const {
    stage<value_bits>(tile, value_codes, offsets + kKeys, norms + kKeys, value_table, thread_index);
  }

  template <int bits>
  METAL_FUNC void stage(
      threadgroup float* tile,
      device const uint* codes,
      threadgroup const int64_t* places,
      threadgroup const float* factors,
      threadgroup const float* table,
      uint thread_index) const {
    constexpr int kEights = D / 8;
    for (int item = int(thread_index); item < kKeys * kEights; item += kThreads) {
      const int key = item / kEights;
      const int column = item % kEights * 8;
      const EightCodes<bits> eight = eight_codes<bits>(codes + places[key], column);
      threadgroup float* target = tile + key * tile_stride<float>(D) + column;
      UNROLL for (int i = 0; i < 8; i += 4) * (threadgroup float4*)(target + i) =
          factors[key] * centroids_of(eight, i, table);
    }
  }
};

template <int key_bits, int value_bits, int D, int kSimdgroups>
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
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int kThreads = kSimdgroups * 32;
  constexpr int kKeys = keys_of_tile<float, D>();
  alignas(16) threadgroup float tile[size_of_tile<float, D>()];
  threadgroup int64_t offsets[2 * kKeys];
  threadgroup float norms[2 * kKeys];
  threadgroup float key_table[1 << key_bits];
  threadgroup float value_table[1 << value_bits];
  stage_table(key_table, key_codebook, 1 << key_bits, thread_index, kThreads);
  stage_table(value_table, value_codebook, 1 << value_bits, thread_index, kThreads);
  CodedPages<key_bits, value_bits, D, kThreads> pages;
  pages.key_codes = key_codes;
  pages.key_norms = key_norms;
  pages.value_codes = value_codes;
  pages.value_norms = value_norms;
  pages.key_table = key_table;
  pages.value_table = value_table;
  pages.offsets = offsets;
  pages.norms = norms;
  pages.parameters = &parameters;
  attend<float, D>(
      q, block_table, cu_seqlens, seq_lens, sinks, out, o_partials, m_partials, l_partials, errors, parameters.paged,
      pages, tile, group, thread_index, lane, simdgroup);
}
