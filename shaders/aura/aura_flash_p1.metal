// One threadgroup owns kRows query rows of one KV head and one block of keys, in tiles of 128: for scores a thread owns
// a key, for the softmax a simdgroup every fourth row, for the output a thread one column of each 128 (of each 64 with
// D = 64, where simdgroups 2 and 3 take the tile's upper half). In registers: kRows scores, then o [kRows, columns].
// Layout: codes [B, HK, T, words], norms and means [B, HK, T], q_rot [B, HQ, L, D], all with strides; o_partials
// [B, HQ, L, NB, D], m, l and mean [B, HQ, L, NB] f32, contiguous.
#include "aura/aura_flash_p1.h"
#include "aura/codes.h"
#include "aura/visibility.h"

// kCount codes from a multiple of 16 on: whole words but for 3 bits, whose 16 codes end within one.
template <int bits, int kCount, int D, int kRows>
METAL_FUNC void add_scores(
    thread float* scores,
    device const uint* words,
    int first,
    threadgroup const float* q,
    threadgroup const float* table) {
  constexpr int kWords = words_of(kCount, bits);
  uint held[kWords];
  UNROLL for (int i = 0; i < kWords; ++i) held[i] = words[first * bits / 32 + i];
  UNROLL for (int d = 0; d < kCount; d += 4) {
    float4 centroids;
    UNROLL for (int i = 0; i < 4; ++i) {
      const int bit = (d + i) * bits;
      uint code = held[bit / 32] >> uint(bit % 32);
      if (bit % 32 + bits > 32) code |= held[bit / 32 + 1] << uint(32 - bit % 32);
      centroids[i] = table[code & ((1u << bits) - 1u)];
    }
    UNROLL for (int row = 0; row < kRows; ++row) {
      const float4 query = *(threadgroup const float4*)(q + row * D + first + d);
      scores[row] += dot(query, centroids);
    }
  }
}

// q . centroids of one key, for each row.
template <int bits, int D, int kRows>
METAL_FUNC void dot_products(
    thread float* scores, device const uint* words, threadgroup const float* q, threadgroup const float* table) {
  UNROLL for (int row = 0; row < kRows; ++row) scores[row] = 0.0f;
  for (int first = 0; first + 32 <= D; first += 32) add_scores<bits, 32, D, kRows>(scores, words, first, q, table);
  if constexpr (D % 32 != 0) add_scores<bits, 16, D, kRows>(scores, words, D - 16, q, table);
}

// Scores of a row and tile -> weights of the values' centroids; a masked score is -inf, its weight 0. Returns what o so
// far is multiplied by. Every lane calls.
METAL_FUNC float online_softmax(
    threadgroup float* scores,
    thread RowSums& sums,
    threadgroup const float* value_norms,
    threadgroup const float* value_means,
    uint lane) {
  float largest = sums.m;
  UNROLL for (int part = 0; part < kFlashKeys / 32; ++part) {
    const float score = scores[part * 32 + int(lane)];
    if (score > largest) largest = score;
  }
  largest = simd_max(largest);
  const bool any = largest > -INFINITY;
  const float decay = any ? exp(sums.m - largest) : 1.0f;
  float sum = 0.0f;
  float mean = 0.0f;
  UNROLL for (int part = 0; part < kFlashKeys / 32; ++part) {
    const int key = part * 32 + int(lane);
    const float score = scores[key];
    const bool seen = score != -INFINITY;
    const float weight = seen ? exp(score - largest) : 0.0f;
    sum += weight;
    if (seen) mean += weight * value_means[key];
    scores[key] = seen ? weight * value_norms[key] : 0.0f;
  }
  sums.m = largest;
  sums.l = sums.l * decay + simd_sum(sum);
  sums.mean = sums.mean * decay + simd_sum(mean);
  return decay;
}

// o += weights . centroids for a thread's columns, over kStep keys of the tile from `first` on, four at a time; weights
// past the tile's `count` keys are 0.
template <int bits, int D, int kRows, int kStep>
METAL_FUNC void add_values(
    thread float* o,
    threadgroup const float* weights,
    device const uint* words,
    int64_t token_stride,
    int first,
    int count,
    int column,
    threadgroup const float* table) {
  constexpr int kColumns = (D + kStep - 1) / kStep;
  const int last = min(count, first + kStep);
  for (int t = first; t < last; t += 4) {
    UNROLL for (int c = 0; c < kColumns; ++c) {
      const int d = min(column + c * kStep, D - 1);
      float4 centroids;
      UNROLL for (int i = 0; i < 4; ++i) {
        centroids[i] = table[code_at<bits>(words + min(t + i, count - 1) * token_stride, d)];
      }
      UNROLL for (int row = 0; row < kRows; ++row) {
        o[row * kColumns + c] += dot(*(threadgroup const float4*)(weights + row * kFlashKeys + t), centroids);
      }
    }
  }
}

template <int key_bits, int value_bits, int D, int kRows>
[[kernel]] void aura_flash_p1(
    device const float* q_rot [[buffer(0)]],
    device const float* q_sums [[buffer(1)]],
    device const uint* key_codes [[buffer(2)]],
    device const float* key_norms [[buffer(3)]],
    device const float* key_means [[buffer(4)]],
    device const float* key_codebook [[buffer(5)]],
    device const uint* value_codes [[buffer(6)]],
    device const float* value_norms [[buffer(7)]],
    device const float* value_means [[buffer(8)]],
    device const float* value_codebook [[buffer(9)]],
    device const int* starts [[buffer(10)]],
    device float* o_partials [[buffer(11)]],
    device float* m_partials [[buffer(12)]],
    device float* l_partials [[buffer(13)]],
    device float* mean_partials [[buffer(14)]],
    constant FlashParameters& parameters [[buffer(15)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(
      kRows == 1 || kRows == 2 || kRows == 4 || kRows == kFlashMostRows, "rows come in powers of two up to 8");
  static_assert(D % 16 == 0 && D >= 64 && D <= 512, "a row of q is whole float4");
  constexpr int kHalves = D == 64 ? 2 : 1;     // of the keys, for the output
  constexpr int kStep = kFlashKeys / kHalves;  // from a thread's column to its next
  constexpr int kColumns = (D + kStep - 1) / kStep;
  constexpr int kRowsOfSimdgroup = (kRows + 3) / 4;
  alignas(16) threadgroup float q[kRows * D];
  alignas(16) threadgroup float scores[kRows * kFlashKeys];
  threadgroup float norms[2 * kFlashKeys];  // of the values, and their means
  threadgroup float key_table[1 << key_bits];
  threadgroup float value_table[1 << value_bits];
  threadgroup float decays[kRows];

  const int rows = parameters.rows;
  const int row_tiles = (rows + kRows - 1) / kRows;
  const int block = int(group.x);
  const int kv_head = int(group.y) / row_tiles;
  const int first_row = int(group.y) % row_tiles * kRows;
  const int batch = int(group.z);
  stage_table(key_table, key_codebook, 1 << key_bits, thread_index, kFlashKeys);
  stage_table(value_table, value_codebook, 1 << value_bits, thread_index, kFlashKeys);
  for (int row = 0; row < kRows; ++row) {
    const RowPlace place = row_place(parameters, batch, kv_head, min(first_row + row, rows - 1));
    device const float* source = q_rot + offset_of(parameters.q, batch, place.head, place.query);
    for (int d = int(thread_index); d < D; d += kFlashKeys) q[row * D + d] = source[d];
  }

  // The keys that any row sees.
  const KeyRange whole = block_range(parameters, block);
  const KeyRange needed = range_of_rows(parameters, starts, batch, first_row, min(first_row + kRows, rows) - 1, whole);

  RowSums sums[kRowsOfSimdgroup];
  UNROLL for (int i = 0; i < kRowsOfSimdgroup; ++i) sums[i] = no_sums();
  float o[kRows * kColumns];
  UNROLL for (int i = 0; i < kRows * kColumns; ++i) o[i] = 0.0f;
  const int part = kHalves == 2 ? int(simdgroup) / 2 : 0;
  const int column = kHalves == 2 ? int(thread_index) % kStep : int(thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int first = needed.first; first < needed.last; first += kFlashKeys) {
    const int count = min(kFlashKeys, needed.last - first);
    const int key = first + min(int(thread_index), count - 1);
    float dots[kRows];
    dot_products<key_bits, D, kRows>(
        dots, key_codes + offset_of(parameters.key_codes, batch, kv_head, key), q, key_table);
    const float key_norm = key_norms[offset_of(parameters.key_norms, batch, kv_head, key)];
    const float key_mean = mean_at(key_means, parameters.key_means, parameters.has_key_means, batch, kv_head, key);
    UNROLL for (int row = 0; row < kRows; ++row) {
      const int index = min(first_row + row, rows - 1);
      const KeyRange seen = visible_range(parameters, starts, batch, index, whole);
      const RowPlace place = row_place(parameters, batch, kv_head, index);
      const float q_sum = mean_at(q_sums, parameters.q_sums, parameters.has_key_means, batch, place.head, place.query);
      const float score = fma(dots[row], key_norm, key_mean * q_sum);
      const bool is_seen = int(thread_index) < count && key >= seen.first && key < seen.last;
      scores[row * kFlashKeys + int(thread_index)] = is_seen ? score : -INFINITY;
    }
    norms[thread_index] = value_norms[offset_of(parameters.value_norms, batch, kv_head, key)];
    norms[kFlashKeys + int(thread_index)] =
        mean_at(value_means, parameters.value_means, parameters.has_value_means, batch, kv_head, key);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    UNROLL for (int i = 0; i < kRowsOfSimdgroup; ++i) {
      const int row = i * 4 + int(simdgroup);
      if (row < kRows) {
        const float decay = online_softmax(scores + row * kFlashKeys, sums[i], norms, norms + kFlashKeys, lane);
        if (lane == 0) decays[row] = decay;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    UNROLL for (int row = 0; row < kRows; ++row) {
      const float decay = decays[row];
      UNROLL for (int c = 0; c < kColumns; ++c) o[row * kColumns + c] *= decay;
    }
    add_values<value_bits, D, kRows, kStep>(
        o, scores, value_codes + offset_of(parameters.value_codes, batch, kv_head, first), parameters.value_codes.token,
        part * kStep, count, column, value_table);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  if constexpr (kHalves == 2) {
    UNROLL for (int row = 0; row < kRows; ++row) {
      if (part == 1) scores[row * kFlashKeys + column] = o[row * kColumns];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int row = 0; row < kRows; ++row) {
      if (part == 0) o[row * kColumns] += scores[row * kFlashKeys + column];
    }
  }
  UNROLL for (int row = 0; row < kRows; ++row) {
    const int64_t target = row_place(parameters, batch, kv_head, first_row + row).index * parameters.blocks + block;
    UNROLL for (int c = 0; c < kColumns; ++c) {
      const int d = column + c * kStep;
      if (first_row + row < rows && part == 0 && d < D) o_partials[target * D + d] = o[row * kColumns + c];
    }
  }
  UNROLL for (int i = 0; i < kRowsOfSimdgroup; ++i) {
    const int row = i * 4 + int(simdgroup);
    if (row < kRows && first_row + row < rows && lane == 0) {
      const int64_t target = row_place(parameters, batch, kv_head, first_row + row).index * parameters.blocks + block;
      store_sums(sums[i], m_partials, l_partials, mean_partials, target, parameters.has_value_means);
    }
  }
}
