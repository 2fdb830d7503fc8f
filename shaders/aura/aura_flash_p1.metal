// One threadgroup owns kRows query rows of one KV head and one block of keys, in tiles of 128: for scores a thread owns
// a key, for the softmax a simdgroup every fourth row, for the output a thread 4 columns of a slice of the keys. In
// registers: kRows scores, then o [kRows, 4] of the slice; the slices' sum is taken after the last tile. Codes are read
// many words at once, before any is used: a read from memory lasts longer than the work on a tile.
// Layout: codes [B, HK, T, words], norms and means [B, HK, T], q_rot [B, HQ, L, D], all with strides; o_partials
// [B, HQ, L, NB, D], m, l and mean [B, HQ, L, NB] f32, contiguous. Norms are f16, means and q_rot f32.
#include "aura/aura_flash_p1.h"
#include "aura/codes.h"
#include "aura/visibility.h"

// Adds q . centroids of kCount codes of a key, whose words are all read first. `first` is a multiple of 16, so that the
// codes are whole words, except for 3 and 5 bits, whose 16 codes end within one. The windows of a trellis code reach
// into the word behind the codes.
template <int code, int kCount, int D, int kRows>
METAL_FUNC void add_scores(
    thread float* scores,
    device const uint* words,
    int first,
    threadgroup const float* q,
    threadgroup const float* table) {
  constexpr int bits = bits_of(code);
  constexpr int needed = bits_of_windows(4, code);
  constexpr int kWords = words_of(kCount, code);
  constexpr bool kReaches = code > kTrellis && kCount * bits % 32 == 0;
  uint held[kWords + (kReaches ? 1 : 0)];
  if constexpr (kReaches) held[kWords] = words[word_behind<code, D>(first * bits / 32 + kWords - 1)];
  words += first * bits / 32;  // once: that words[i] are neighbours then shows, and 4 are a load
  UNROLL for (int i = 0; i < kWords; ++i) held[i] = words[i];
  UNROLL for (int d = 0; d < kCount; d += 4) {
    const int bit = d * bits;
    uint codes = held[bit / 32] >> uint(bit % 32);
    if (bit % 32 + needed > 32) codes |= held[bit / 32 + 1] << uint(32 - bit % 32);
    const float4 centroids = centroids_of<code>(codes, table);
    UNROLL for (int row = 0; row < kRows; ++row) {
      const float4 query = *(threadgroup const float4*)(q + row * D + first + d);
      UNROLL for (int i = 0; i < 4; ++i) scores[row] = fma(query[i], centroids[i], scores[row]);
    }
  }
}

// q . centroids of one key, for each row.
template <int code, int D, int kRows>
METAL_FUNC void dot_products(
    thread float* scores, device const uint* words, threadgroup const float* q, threadgroup const float* table) {
  UNROLL for (int row = 0; row < kRows; ++row) scores[row] = 0.0f;
  constexpr int kCount = code == 8 ? 32 : 64;  // of at most 10 words
  for (int first = 0; first + kCount <= D; first += kCount) {
    add_scores<code, kCount, D, kRows>(scores, words, first, q, table);
  }
  if constexpr (D % kCount >= 32) add_scores<code, 32, D, kRows>(scores, words, D / kCount * kCount, q, table);
  if constexpr (D % 32 != 0) add_scores<code, 16, D, kRows>(scores, words, D - 16, q, table);
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

// o += weights . centroids for a thread's 4 columns, over its slice of the tile's keys: 4 of each kSlices * 4 from
// `first` on. Weights past the tile's `count` keys are 0.
template <int code, int D, int kRows, int kSlices>
METAL_FUNC void add_values(
    thread float4* o,
    threadgroup const float* weights,
    device const uint* words,
    int64_t token_stride,
    int first,
    int count,
    int column,
    threadgroup const float* table) {
  constexpr int kHeld = kRows <= 4 ? 8 : 4;  // keys whose codes are read at once
  for (int start = first; start < count; start += kHeld * kSlices) {
    uint codes[kHeld];
    UNROLL for (int i = 0; i < kHeld; ++i) {
      const int key = start + i / 4 * 4 * kSlices + i % 4;
      codes[i] = four_codes<code, D>(words + min(key, count - 1) * token_stride, column);
    }
    UNROLL for (int i = 0; i < kHeld; i += 4) {
      const int key = start + i * kSlices;
      if (key < count) {
        float4 centroids[4];
        UNROLL for (int j = 0; j < 4; ++j) centroids[j] = centroids_of<code>(codes[i + j], table);
        UNROLL for (int row = 0; row < kRows; ++row) {
          const float4 weight = *(threadgroup const float4*)(weights + row * kFlashKeys + key);
          UNROLL for (int j = 0; j < 4; ++j) o[row] += weight[j] * centroids[j];
        }
      }
    }
  }
}

template <int key_code, int value_code, int D, int kRows>
[[kernel]] void aura_flash_p1(
    device const float* q_rot [[buffer(0)]],
    device const float* q_sums [[buffer(1)]],
    device const uint* key_codes [[buffer(2)]],
    device const half* key_norms [[buffer(3)]],
    device const float* key_means [[buffer(4)]],
    device const float* key_codebook [[buffer(5)]],
    device const uint* value_codes [[buffer(6)]],
    device const half* value_norms [[buffer(7)]],
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
  constexpr int kOwners = D / 4;                 // of a key's columns
  constexpr int kSlices = kFlashKeys / kOwners;  // of a tile's keys
  constexpr int kRowsOfSimdgroup = (kRows + 3) / 4;
  alignas(16)
      threadgroup float q[(kRows < kSlices ? kSlices - 1 : kRows) * D];  // then a row of o of each slice but one
  alignas(16) threadgroup float scores[kRows * kFlashKeys];
  threadgroup float norms[2 * kFlashKeys];  // of the values, and their means
  threadgroup float key_table[entries_of(key_code)];
  threadgroup float value_table[entries_of(value_code)];
  threadgroup float decays[kRows];

  const int rows = parameters.rows;
  const int row_tiles = (rows + kRows - 1) / kRows;
  const int block = int(group.x);
  const int kv_head = int(group.y) / row_tiles;
  const int first_row = int(group.y) % row_tiles * kRows;
  const int batch = int(group.z);
  stage_table(key_table, key_codebook, entries_of(key_code), thread_index, kFlashKeys);
  stage_table(value_table, value_codebook, entries_of(value_code), thread_index, kFlashKeys);
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
  float4 o[kRows];
  UNROLL for (int row = 0; row < kRows; ++row) o[row] = float4(0.0f);
  const int slice = int(thread_index) / kOwners;  // past the last where the owners are no power of two
  const int column = int(thread_index) % kOwners * 4;
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int first = needed.first; first < needed.last; first += kFlashKeys) {
    const int count = min(kFlashKeys, needed.last - first);
    const int key = first + min(int(thread_index), count - 1);
    float dots[kRows];
    dot_products<key_code, D, kRows>(
        dots, key_codes + offset_of(parameters.key_codes, batch, kv_head, key), q, key_table);
    const float key_norm = float(key_norms[offset_of(parameters.key_norms, batch, kv_head, key)]);
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
    norms[thread_index] = float(value_norms[offset_of(parameters.value_norms, batch, kv_head, key)]);
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

    UNROLL for (int row = 0; row < kRows; ++row) o[row] *= decays[row];
    if (slice < kSlices) {
      add_values<value_code, D, kRows, kSlices>(
          o, scores, value_codes + offset_of(parameters.value_codes, batch, kv_head, first),
          parameters.value_codes.token, slice * 4, count, column, value_table);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  UNROLL for (int row = 0; row < kRows; ++row) {
    if (slice > 0 && slice < kSlices) *(threadgroup float4*)(q + (slice - 1) * D + column) = o[row];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (slice == 0 && first_row + row < rows) {
      UNROLL for (int i = 0; i < kSlices - 1; ++i) o[row] += *(threadgroup const float4*)(q + i * D + column);
      const int64_t target = row_place(parameters, batch, kv_head, first_row + row).index * parameters.blocks + block;
      UNROLL for (int i = 0; i < 4; ++i) o_partials[target * D + column + i] = o[row][i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  UNROLL for (int i = 0; i < kRowsOfSimdgroup; ++i) {
    const int row = i * 4 + int(simdgroup);
    if (row < kRows && first_row + row < rows && lane == 0) {
      const int64_t target = row_place(parameters, batch, kv_head, first_row + row).index * parameters.blocks + block;
      store_sums(sums[i], m_partials, l_partials, mean_partials, target, parameters.has_value_means);
    }
  }
}
