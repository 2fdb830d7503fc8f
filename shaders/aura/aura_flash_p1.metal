// One threadgroup owns kRows query rows of one KV head and one block of keys. The simdgroups take turns with tiles of
// keys, and are merged once, after the last key. A lane owns 8 columns (16 if D is 512) of every key that it reads, and
// holds these columns of q and o in registers. So a simdgroup decodes each code once for all rows, and reads whole rows
// of codes. A score is a sum over columns: lanes exchange their parts until each lane has one row's scores of some
// keys. Threadgroup memory holds the weights. o is rescaled only when a row's largest score grows.
// Layout: codes [B, HK, T, words], norms [B, HK, T] f16, q_rot [B, HQ, L, D] f32, all with strides; tile_scores
// [B, HQ, L, tiles], o_partials [B, HQ, L, NB, D], m and l [B, HQ, L, NB] f32, contiguous.
#include "aura/codes.h"
#include "aura/parameters.h"
#include "aura/visibility.h"

GDN_CONSTANT int kFlashSimdgroups = kAuraThreads / 32;

// Lane l owns columns [8 l', 8 l' + 8) in part 0, with l' = l % kLanes. In part 1 it owns the columns kLanes * 8
// further on. Lanes from D / 8 on own nothing: their q is 0, and they read the last columns.
template <int D, int kRows>
struct Columns {
  enum { kLanes = D == 64 ? 8 : D <= 128 ? 16 : 32 };  // lanes that share a key
  enum { kParts = D == 512 ? 2 : 1 };
  enum { kAtOnce = 32 / kLanes };                  // keys that a simdgroup reads at once, one per group of lanes
  enum { kBatch = kLanes / kRows };                // a lane's keys whose scores are exchanged together
  enum { kScores = kBatch < 8 ? 8 / kBatch : 1 };  // scores per lane and tile, of one row with different keys
  enum { kKeys = 32 / kRows * kScores };           // keys per tile
  enum { kOfLane = kKeys / kAtOnce };              // keys of a tile that a lane reads
  enum { kHeld = kOfLane < 4 ? kOfLane : 4 };      // keys whose codes a lane holds at once
  enum { kHolds = kOfLane / kHeld };
  static_assert(D % 8 == 0 && D <= kLanes * kParts * 8, "lanes own all columns");
  static_assert(kRows <= flash_most_rows(D) && kLanes % kRows == 0, "q and o take 64 registers at most");

  METAL_FUNC static bool owns(uint lane) { return int(lane) % kLanes < D / 8; }
  METAL_FUNC static int first(int part, uint lane) { return (part * kLanes + min(int(lane) % kLanes, D / 8 - 1)) * 8; }
  // Returns the lane that owns the next columns.
  METAL_FUNC static ushort next(uint lane) {
    const int own = int(lane) % kLanes;
    return ushort(int(lane) - own + (own + 1 < min(int(kLanes), D / 8) ? own + 1 : 0));
  }
  METAL_FUNC static int key(int i, uint lane) { return i * kAtOnce + int(lane) / kLanes; }  // the i-th key of a lane
};

// Loads q for a lane's columns. Register `row` holds row `row ^ lane % kRows`, so that lanes can exchange sums without
// selecting.
template <int D, int kRows>
METAL_FUNC void load_query(thread float4* q, threadgroup const float* staged, uint lane) {
  typedef Columns<D, kRows> Own;
  UNROLL for (int row = 0; row < kRows; ++row) {
    threadgroup const float* source = staged + (row ^ int(lane) % kRows) * D;
    UNROLL for (int i = 0; i < Own::kParts * 2; ++i) {
      float4 four = *(threadgroup const float4*)(source + Own::first(i / 2, lane) + i % 2 * 4);
      if (!Own::owns(lane)) four = float4(0.0f);
      q[row * Own::kParts * 2 + i] = four;
    }
  }
}

// Sums values over the lanes whose numbers differ in bits kStep, 2 kStep, .. below kLast. A lane's values[i] belongs to
// item i * kStep ^ lane. Each lane gets the sum of the item with the lane's own number.
template <int kStep, int kLast>
METAL_FUNC float sum_of_own_item(thread float* values) {
  UNROLL for (int step = kStep; step < kLast; step *= 2) {
    UNROLL for (int i = 0; i < kLast / kStep; i += 2 * step / kStep) {
      values[i] += simd_shuffle_xor(values[i + step / kStep], ushort(step));
    }
  }
  return values[0];
}

// Does the same if values[i] belongs to item i * kStep in all lanes.
template <int kStep, int kLast>
METAL_FUNC float sum_of_selected_item(thread float* values, uint lane) {
  UNROLL for (int step = kStep; step < kLast; step *= 2) {
    const bool is_second = (int(lane) & step) != 0;
    UNROLL for (int i = 0; i < kLast / kStep; i += 2 * step / kStep) {
      const float first = values[i];
      const float second = values[i + step / kStep];
      values[i] = (is_second ? second : first) + simd_shuffle_xor(is_second ? first : second, ushort(step));
    }
  }
  return values[0];
}

// Holds a lane's columns of the codes of kHeld keys.
template <int code, int D, int kRows>
struct HeldCodes {
  typedef Columns<D, kRows> Own;
  EightCodes<code> codes[Own::kHeld * Own::kParts];

  // Reads kHeld keys of a lane, from number kHeld * hold on, of a tile with `count` keys. Keys from `count` on repeat
  // the last one. The next lane has the bits that follow a lane's columns. The first lane's other part has those that
  // follow the last lane's columns.
  METAL_FUNC void load(device const uint* tile, int token_words, int hold, int count, uint lane) {
    const bool is_first = int(lane) % Own::kLanes == 0;
    UNROLL for (int i = 0; i < Own::kHeld; ++i) {
      const int64_t key = min(Own::key(hold * Own::kHeld + i, lane), count - 1);
      EightCodes<code> own[Own::kParts];
      UNROLL for (int part = 0; part < Own::kParts; ++part) {
        own[part] = bits_of_eight<code>(tile, key * token_words, uint(Own::first(part, lane)));
      }
      UNROLL for (int part = 0; part < Own::kParts; ++part) {
        codes[i * Own::kParts + part] =
            with_bits_behind(own[part], is_first ? own[Own::kParts - 1 - part] : own[part], Own::next(lane));
      }
    }
  }
  METAL_FUNC EightCodes<code> at(int i, int part) const { return codes[i * Own::kParts + part]; }

  // Computes dots = q . centroids of key i, over a lane's columns.
  METAL_FUNC void dot_products(
      thread float* dots, thread const float4* q, int i, threadgroup const float* table) const {
    UNROLL for (int row = 0; row < kRows; ++row) dots[row] = 0.0f;
    UNROLL for (int part = 0; part < Own::kParts; ++part) {
      float4 centroids[2];
      decode_eight(at(i, part), table, centroids);
      UNROLL for (int row = 0; row < kRows; ++row) {
        thread const float4* query = q + (row * Own::kParts + part) * 2;
        UNROLL for (int d = 0; d < 8; ++d) dots[row] = fma(query[d / 4][d % 4], centroids[d / 4][d % 4], dots[row]);
      }
    }
  }

  // Computes o += weight of the row * centroids of key i, for a lane's columns and all rows.
  METAL_FUNC void add_value(
      thread float4* o, thread const float* weights, int i, threadgroup const float* table) const {
    UNROLL for (int part = 0; part < Own::kParts; ++part) {
      float4 centroids[2];
      decode_eight(at(i, part), table, centroids);
      UNROLL for (int row = 0; row < kRows; ++row) {
        thread float4* sums = o + (row * Own::kParts + part) * 2;
        UNROLL for (int d = 0; d < 8; ++d) sums[d / 4][d % 4] =
            fma(weights[row], centroids[d / 4][d % 4], sums[d / 4][d % 4]);
      }
    }
  }
};

// Returns the maximum over the lanes that have scores of the same row.
template <int kRows>
METAL_FUNC float max_of_row(float x) {
  UNROLL for (int step = kRows; step < 32; step *= 2) x = fmax(x, simd_shuffle_xor(x, ushort(step)));
  return x;
}

template <int kCount>
METAL_FUNC float largest_of(threadgroup const float* values) {
  float largest = values[0];
  UNROLL for (int i = 1; i < kCount; ++i) largest = fmax(largest, values[i]);
  return largest;
}

template <int kRows>
METAL_FUNC float sum_of_row(float x) {
  UNROLL for (int step = kRows; step < 32; step *= 2) x += simd_shuffle_xor(x, ushort(step));
  return x;
}

template <int kRows>
METAL_FUNC void load_weights(thread float* weights, threadgroup const float* source) {
  if constexpr (kRows == 1) {
    weights[0] = source[0];
  } else {
    const vec<float, kRows> whole = *(threadgroup const vec<float, kRows>*)source;
    UNROLL for (int row = 0; row < kRows; ++row) weights[row] = whole[row];
  }
}

// Rescales o and the sums when a row's largest score grows. The factors go through threadgroup memory, so that
// compilers keep the branch around this function. Without it they would compute both values of o and select one, which
// costs more than the branch saves.
template <int D, int kRows>
METAL_FUNC void grow(thread float4* o, thread RowSums& sums, float largest, threadgroup float* exchange, uint lane) {
  constexpr int kOwn = Columns<D, kRows>::kParts * 2;
  const float decay = rescale_factor(sums.m, largest);
  sums.m = largest;
  sums.l *= decay;
  if (int(lane) < kRows) exchange[lane] = decay;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  float decays[kRows];
  load_weights<kRows>(decays, exchange);
  UNROLL for (int row = 0; row < kRows; ++row) {
    UNROLL for (int i = 0; i < kOwn; ++i) o[row * kOwn + i] *= decays[row];
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Merges the simdgroups and stores the block's partials. Every thread must call.
template <int D, int kRows>
METAL_FUNC void store_merged(
    thread const float4* o,
    RowSums sums,
    threadgroup float* shared,
    threadgroup float* states,
    Partials partials,
    constant FlashParameters& parameters,
    FlashTile tile,
    uint thread_index) {
  typedef Columns<D, kRows> Own;
  constexpr int kSlices = kFlashSimdgroups * Own::kAtOnce;
  constexpr int kStates = kFlashSimdgroups * kRows;
  const int lane = int(thread_index) % 32;
  const int simdgroup = int(thread_index) / 32;
  sums.l = sum_of_row<kRows>(sums.l);
  if (lane < kRows) {
    threadgroup float* own = states + lane * kFlashSimdgroups + simdgroup;
    own[0] = sums.m;
    own[kStates] = sums.l;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (Own::owns(uint(lane))) {
    const int slice = simdgroup * Own::kAtOnce + lane / Own::kLanes;
    UNROLL for (int row = 0; row < kRows; ++row) {
      threadgroup const float* largest = states + row * kFlashSimdgroups;
      const float factor = rescale_factor(largest[simdgroup], largest_of<kFlashSimdgroups>(largest));
      UNROLL for (int i = 0; i < Own::kParts * 2; ++i) {
        *(threadgroup float4*)(shared + (slice * kRows + row) * D + Own::first(i / 2, uint(lane)) + i % 2 * 4) =
            o[row * Own::kParts * 2 + i] * factor;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int item = int(thread_index); item < kRows * D / 4; item += kAuraThreads) {
    const int row = item / (D / 4);
    const int column = item % (D / 4) * 4;
    if (tile.first_row + row < parameters.rows) {
      const RowPlace place = row_place(parameters, tile, tile.first_row + row);
      const int64_t target = place.index * parameters.blocks + tile.block;
      float4 sum = float4(0.0f);
      UNROLL for (int slice = 0; slice < kSlices; ++slice) {
        sum += *(threadgroup const float4*)(shared + (slice * kRows + row) * D + column);
      }
      UNROLL for (int i = 0; i < 4; ++i) partials.o[target * D + column + i] = sum[i];
      if (column == 0) {
        threadgroup const float* own = states + row * kFlashSimdgroups;
        const float largest = largest_of<kFlashSimdgroups>(own);
        float l = 0.0f;
        UNROLL for (int i = 0; i < kFlashSimdgroups; ++i) l += own[kStates + i] * rescale_factor(own[i], largest);
        partials.m[target] = largest;
        partials.l[target] = l;
      }
    }
  }
}

template <int key_code, int value_code, int D, int kRows>
[[kernel]] void aura_flash_p1(
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
  typedef Columns<D, kRows> Own;
  constexpr int kSlices = kFlashSimdgroups * Own::kAtOnce;  // slices of the keys; each has its own o
  constexpr int kStates = kFlashSimdgroups * kRows;
  constexpr int kRound = kFlashSimdgroups * Own::kKeys;  // keys per round
  static_assert(kRows == 1 || kRows == 2 || kRows == 4, "rows come in powers of two");
  static_assert(kFlashKeys % kRound == 0, "a block of the default size is whole rounds");
  alignas(16) threadgroup float weights[kFlashSimdgroups * Own::kKeys * kRows];
  alignas(16) threadgroup float shared[kSlices * kRows * D];  // q, and later o of each slice
  alignas(16) threadgroup float states[2 * kStates];          // largest scores, then l
  threadgroup float key_table[entries_of(key_code)];
  threadgroup float value_table[entries_of(value_code)];

  const FlashTile tile = flash_tile<kRows, D, D>(parameters, group);
  stage_table(key_table, key_codebook, entries_of(key_code), thread_index, kAuraThreads);
  stage_table(value_table, value_codebook, entries_of(value_code), thread_index, kAuraThreads);
  if (int(simdgroup) < kRows) {  // each simdgroup stages one row of q
    const RowPlace place = row_place(parameters, tile, min(tile.first_row + int(simdgroup), parameters.rows - 1));
    device const float* source = q_rot + offset_of(parameters.q, tile.batch, place.head, place.query);
    UNROLL for (int start = 0; start < D; start += 32) {
      const int d = start + int(lane);
      if (D % 32 == 0 || d < D) shared[int(simdgroup) * D + d] = source[d];
    }
  }

  // `needed` are the keys that any row sees, and `seen` those that the lane's row sees.
  const KeyRange whole = block_range(parameters, tile.block);
  const KeyRange needed = range_of_rows<Own::kKeys>(parameters, starts, tile, whole);
  const int own_row = min(tile.first_row + int(lane) % kRows, parameters.rows - 1);
  const KeyRange seen = visible_range(parameters, starts, tile.batch, own_row, whole);
  const TileScores own_tile_scores = tile_scores_of(tile_scores, parameters, row_place(parameters, tile, own_row));

  RowSums sums = no_sums();  // of the lane's row; l covers only the lane's keys
  float4 o[kRows * Own::kParts * 2];
  UNROLL for (int i = 0; i < kRows * Own::kParts * 2; ++i) o[i] = float4(0.0f);
  const int key_of_batch = int(lane) % Own::kLanes / kRows * Own::kAtOnce + int(lane) / Own::kLanes;
  int base = min(needed.first + int(simdgroup) * Own::kKeys, needed.last - 1);  // a tile may lie past the last key
  device const uint* tile_keys = key_codes + offset_of(parameters.key_codes, tile.batch, tile.kv_head, base);
  device const uint* tile_values = value_codes + offset_of(parameters.value_codes, tile.batch, tile.kv_head, base);
  const int key_words = int(parameters.key_codes.token);
  const int value_words = int(parameters.value_codes.token);
  device const half* own_key_norms = key_norms + offset_of(parameters.key_norms, tile.batch, tile.kv_head, 0);
  device const half* own_value_norms = value_norms + offset_of(parameters.value_norms, tile.batch, tile.kv_head, 0);
  threadgroup float* own_weights = weights + int(simdgroup) * Own::kKeys * kRows;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float4 q[kRows * Own::kParts * 2];
  load_query<D, kRows>(q, shared, lane);

  for (int round = needed.first; round < needed.last; round += kRound) {
    const int first = round + int(simdgroup) * Own::kKeys;
    const int count = needed.last - base;

    // Scores
    half key_scales[Own::kScores];
    half value_scales[Own::kScores];
    UNROLL for (int i = 0; i < Own::kScores; ++i) {
      const int present = min(first + i * Own::kBatch * Own::kAtOnce + key_of_batch, needed.last - 1);
      key_scales[i] = own_key_norms[present * parameters.key_norms.token];
      value_scales[i] = own_value_norms[present * parameters.value_norms.token];
    }
    float scores[Own::kScores];
    float dots[Own::kBatch * Own::kScores];
    HeldCodes<value_code, D, kRows> held_values;
    UNROLL for (int hold = 0; hold < Own::kHolds; ++hold) {
      HeldCodes<key_code, D, kRows> held;
      held.load(tile_keys, key_words, hold, count, lane);
      if (hold + 1 == Own::kHolds) held_values.load(tile_values, value_words, 0, count, lane);
      UNROLL for (int i = 0; i < Own::kHeld; ++i) {
        float row_values[kRows];
        held.dot_products(row_values, q, i, key_table);
        dots[hold * Own::kHeld + i] = sum_of_own_item<1, kRows>(row_values);
      }
    }
    float largest = sums.m;
    const float tile_score = own_tile_scores.at(base);
    UNROLL for (int i = 0; i < Own::kScores; ++i) {
      const int key = first + i * Own::kBatch * Own::kAtOnce + key_of_batch;
      const float dot = sum_of_selected_item<kRows, Own::kLanes>(dots + i * Own::kBatch, lane);
      const bool is_seen = key < needed.last && key >= seen.first && key < seen.last;
      scores[i] = is_seen ? fma(dot, float(key_scales[i]), tile_score) : -INFINITY;
      if (scores[i] > largest) largest = scores[i];
    }

    // Softmax
    largest = max_of_row<kRows>(largest);
    if (simd_any(largest > sums.m)) {
      grow<D, kRows>(o, sums, largest, own_weights, lane);
    }
    UNROLL for (int i = 0; i < Own::kScores; ++i) {
      const bool is_seen = scores[i] != -INFINITY;
      const float weight = is_seen ? exp(scores[i] - sums.m) : 0.0f;
      sums.l += weight;
      const int key = i * Own::kBatch * Own::kAtOnce + key_of_batch;
      own_weights[key * kRows + int(lane) % kRows] = is_seen ? weight * float(value_scales[i]) : 0.0f;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);

    // Output
    UNROLL for (int hold = 0; hold < Own::kHolds; ++hold) {
      if (hold > 0) held_values.load(tile_values, value_words, hold, count, lane);
      UNROLL for (int i = 0; i < Own::kHeld; ++i) {
        float row_values[kRows];
        load_weights<kRows>(row_values, own_weights + Own::key(hold * Own::kHeld + i, lane) * kRows);
        held_values.add_value(o, row_values, i, value_table);
      }
    }
    const int advance = min(kRound, count - 1);
    base += advance;
    tile_keys += advance * parameters.key_codes.token;
    tile_values += advance * parameters.value_codes.token;
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }

  store_merged<D, kRows>(o, sums, shared, states, {o_partials, m_partials, l_partials}, parameters, tile, thread_index);
}
