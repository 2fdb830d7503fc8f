// One threadgroup owns 32 query rows of one KV head (8 per simdgroup), one block of keys and up to 256 columns of o. It
// dequantises tiles of 32 keys into threadgroup memory, up to 128 columns at a time. Registers hold scores [8, 32],
// which become the left operand of the product with the values, and o [8, columns]. The 4 lanes that hold a row also
// hold its m and l.
// The layout is that of aura_flash_p1.
#include "aura/codes.h"
#include "aura/parameters.h"
#include "aura/visibility.h"
#include "core/tile.h"

// Stages the centroids of columns [first, first + kSlice) of 32 keys. Keys from `count` on repeat the last one.
template <int code, int D, int kSlice>
METAL_FUNC void dequantise(
    threadgroup float* tile,
    device const uint* codes,
    int64_t token_stride,
    int count,
    int first,
    threadgroup const float* table,
    uint thread_index) {
  constexpr int kLanes = lanes_of_row(kSlice);
  static_assert(kMatrixKeys * kLanes % kAuraThreads == 0, "whole simdgroups dequantise");
  for (int base = 0; base < kMatrixKeys * kLanes; base += kAuraThreads) {
    const int item = base + int(thread_index);
    const int key = item / kLanes;
    const int column = item % kLanes * 8;
    const bool loads = column < kSlice;
    const EightCodes<code> eight =
        shared_eight<code, D, kSlice>(codes + min(key, count - 1) * token_stride, first, loads, thread_index % 32);
    float4 centroids[2];
    decode_eight(eight, table, centroids);
    threadgroup float* target = tile + key * tile_stride<float>(kSlice) + column;
    UNROLL for (int i = 0; i < 2; ++i) {
      if (loads) *(threadgroup float4*)(target + i * 4) = centroids[i];
    }
  }
}

// Reduces over the 4 lanes that hold a row of a fragment.
METAL_FUNC float row_max(float x) {
  x = fmax(x, simd_shuffle_xor(x, ushort(1)));
  return fmax(x, simd_shuffle_xor(x, ushort(8)));
}

METAL_FUNC float row_sum(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  return x + simd_shuffle_xor(x, ushort(8));
}

// Turns dot products into scores, [8, 32] in fragments. A key that the row does not see gets -inf. `first` is the
// tile's first key.
METAL_FUNC void mask_scores(
    thread float2* scores,
    threadgroup const float* norms,
    float tile_score,
    int first,
    int count,
    KeyRange seen,
    LanePosition at) {
  UNROLL for (int n = 0; n < kMatrixKeys / 8; ++n) {
    UNROLL for (int i = 0; i < 2; ++i) {
      const int key = n * 8 + at.column + i;
      const bool is_seen = key < count && first + key >= seen.first && first + key < seen.last;
      scores[n][i] = is_seen ? fma(scores[n][i], norms[key], tile_score) : -INFINITY;
    }
  }
}

// Turns scores into weights of the values' centroids. A key that the row does not see gets 0, even if its norm is not
// finite. Returns the factor for the o of earlier tiles. Every lane must call.
METAL_FUNC float online_softmax(
    thread float2* scores, thread RowSums& sums, threadgroup const float* norms, LanePosition at) {
  float largest = sums.m;
  UNROLL for (int n = 0; n < kMatrixKeys / 8; ++n) {
    if (scores[n].x > largest) largest = scores[n].x;
    if (scores[n].y > largest) largest = scores[n].y;
  }
  largest = row_max(largest);
  const float decay = rescale_factor(sums.m, largest);
  float l = 0.0f;
  UNROLL for (int n = 0; n < kMatrixKeys / 8; ++n) {
    UNROLL for (int i = 0; i < 2; ++i) {
      const int key = n * 8 + at.column + i;
      const bool is_seen = scores[n][i] != -INFINITY;
      const float weight = is_seen ? exp(scores[n][i] - largest) : 0.0f;
      l += weight;
      scores[n][i] = is_seen ? weight * norms[key] : 0.0f;
    }
  }
  sums.m = largest;
  sums.l = sums.l * decay + row_sum(l);
  return decay;
}

template <int key_code, int value_code, int D>
[[kernel]] void aura_flash_p1_matrix(
    device const float* q_rot [[buffer(0)]],
    device const uint* key_codes [[buffer(1)]],
    device const half* key_norms [[buffer(2)]],
    device const float* key_codebook [[buffer(3)]],
    device const uint* value_codes [[buffer(4)]],
    device const half* value_norms [[buffer(5)]],
    device const float* value_codebook [[buffer(6)]],
    device const int* starts [[buffer(7)]],
    device float* o_partials [[buffer(8)]],
    device float* m_partials [[buffer(9)]],
    device float* l_partials [[buffer(10)]],
    device const float* tile_scores [[buffer(11)]],
    constant FlashParameters& parameters [[buffer(12)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int kSlice = smaller(D, kMatrixSlice);
  constexpr int kOwn = smaller(D, kMatrixColumns);  // columns of o
  constexpr int kStride = tile_stride<float>(kSlice);
  static_assert(D % kSlice == 0 && kSlice % 8 == 0 && D % kOwn == 0, "vectors are whole slices of whole blocks");
  alignas(16) threadgroup float tile[kMatrixKeys * kStride];
  threadgroup float norms_of_keys[kMatrixKeys];
  threadgroup float norms_of_values[kMatrixKeys];
  threadgroup float key_table[entries_of(key_code)];
  threadgroup float value_table[entries_of(value_code)];

  const FlashTile own = flash_tile<kMatrixRows, D, kOwn>(parameters, group);
  stage_table(key_table, key_codebook, entries_of(key_code), thread_index, kAuraThreads);
  stage_table(value_table, value_codebook, entries_of(value_code), thread_index, kAuraThreads);

  const LanePosition at = lane_position(lane);
  const int row = own.first_row + int(simdgroup) * 8 + at.row;
  const int seen_row = min(row, parameters.rows - 1);
  const RowPlace place = row_place(parameters, own, seen_row);
  device const float* query = q_rot + offset_of(parameters.q, own.batch, place.head, place.query) + at.column;
  const TileScores own_tile_scores = tile_scores_of(tile_scores, parameters, place);

  // The keys that this row sees, and those that any row sees.
  const KeyRange whole = block_range(parameters, own.block);
  const KeyRange seen = visible_range(parameters, starts, own.batch, seen_row, whole);
  const KeyRange needed = range_of_rows<kMatrixKeys>(parameters, starts, own, whole);

  RowSums sums = no_sums();
  float2 o[kOwn / 8];
  UNROLL for (int i = 0; i < kOwn / 8; ++i) o[i] = float2(0.0f);

  for (int first = needed.first; first < needed.last; first += kMatrixKeys) {
    const int count = min(kMatrixKeys, needed.last - first);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (int(thread_index) < kMatrixKeys) {
      const int key = first + min(int(thread_index), count - 1);
      norms_of_keys[thread_index] = float(key_norms[offset_of(parameters.key_norms, own.batch, own.kv_head, key)]);
      norms_of_values[thread_index] =
          float(value_norms[offset_of(parameters.value_norms, own.batch, own.kv_head, key)]);
    }

    // Scores
    device const uint* keys = key_codes + offset_of(parameters.key_codes, own.batch, own.kv_head, first);
    float2 scores[kMatrixKeys / 8];
    UNROLL for (int n = 0; n < kMatrixKeys / 8; ++n) scores[n] = float2(0.0f);
    for (int slice = 0; slice < D; slice += kSlice) {
      if (slice > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
      dequantise<key_code, D, kSlice>(tile, keys, parameters.key_codes.token, count, slice, key_table, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int depth = 0; depth < kSlice; depth += 8) {
        const float2 left = float2(query[slice + depth], query[slice + depth + 1]);
        UNROLL for (int n = 0; n < kMatrixKeys / 8; ++n) {
          multiply_add(scores[n], left, load_transposed(tile + n * 8 * kStride + depth, kStride, at));
        }
      }
    }

    // Softmax
    mask_scores(scores, norms_of_keys, own_tile_scores.at(first), first, count, seen, at);
    const float decay = online_softmax(scores, sums, norms_of_values, at);
    UNROLL for (int i = 0; i < kOwn / 8; ++i) o[i] *= decay;

    // Output
    device const uint* values = value_codes + offset_of(parameters.value_codes, own.batch, own.kv_head, first);
    UNROLL for (int slice = 0; slice < kOwn; slice += kSlice) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      dequantise<value_code, D, kSlice>(
          tile, values, parameters.value_codes.token, count, own.first_column + slice, value_table, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      UNROLL for (int column = 0; column < kSlice; column += 8) {
        UNROLL for (int n = 0; n < kMatrixKeys / 8; ++n) {
          multiply_add(
              o[(slice + column) / 8], scores[n], load_even_fragment(tile + n * 8 * kStride + column, kStride, at));
        }
      }
    }
  }

  const int64_t target = place.index * parameters.blocks + own.block;
  if (row < parameters.rows) {
    UNROLL for (int i = 0; i < kOwn / 8; ++i) {
      device float* out = o_partials + target * D + own.first_column + i * 8 + at.column;
      out[0] = o[i].x;
      out[1] = o[i].y;
    }
    if (own.first_column == 0 && at.column == 0) {
      m_partials[target] = sums.m;
      l_partials[target] = sums.l;
    }
  }
}
