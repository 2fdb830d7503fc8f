// One threadgroup owns 8 query rows of one KV head, one block of keys and up to 256 columns of o. The simdgroups take
// turns with tiles of 32 keys, and are merged once, after the last key:
//     scores [keys, rows] = K Q^T,    o [D, rows] += V^T weights.
// A lane decodes codes straight into its elements of K and V (core/row_attention.h). So a simdgroup decodes each code
// once, and only q lies in threadgroup memory. Registers hold scores [32, 8] and o [columns, 8].
// The layout is that of aura_flash_p1.
#include "aura/codes.h"
#include "aura/parameters.h"
#include "aura/visibility.h"

// Holds the codes of one key or value. The lanes that share its row of fragments share its codes: 4 lanes for a key, 8
// for a value. In each group of columns a lane has 8 neighbouring values. If the last group is smaller, several lanes
// load the same 8 values, and each keeps a part.
template <int code, int D, int kLanes>
struct SharedCodes {
  enum { kWhole = D / 8 / kLanes };  // whole groups
  enum { kRest = D / 8 % kLanes };   // eights in the last group, if it is smaller
  enum { kGroups = kWhole + (kRest > 0 ? 1 : 0) };
  enum { kOfEight = kRest > 0 ? kLanes / kRest : 1 };  // lanes that load the same eight in the last group
  enum { kLastWidth = 8 / kOfEight };
  static_assert(kRest == 0 || kLanes % kRest == 0, "as many lanes have each eight");
  EightCodes<code> codes[kGroups];

  METAL_FUNC static int own(LanePosition at) { return kLanes == 4 ? at.column / 2 : at.row; }
  METAL_FUNC static ushort lane_of(LanePosition at, int own) {
    return kLanes == 4 ? lane_at(at.row, own * 2) : lane_at(own, at.column);
  }

  // Loads D columns from `first_column` on, of a vector with kAll. The next lane has the bits that follow a lane's
  // eight. The first lane of the next group has those that follow a group's last eight.
  template <int kAll>
  METAL_FUNC void load(device const uint* words, int first_column, LanePosition at) {
    const int lane = own(at);
    const int last = kRest > 0 ? lane / kOfEight : lane;  // the lane's eight in the last group
    UNROLL for (int group = 0; group < kGroups; ++group) {
      const int eight = group * kLanes + (group < kWhole ? lane : last);
      codes[group] = bits_of_eight<code>(words, 0, uint(first_column + eight * 8));
    }
    if constexpr (code > kTrellis) {
      const uint first_low = codes[0].low;
      const ushort next = lane_of(at, (lane + 1) % kLanes);
      const ushort next_of_last = lane_of(at, (last + 1) * kOfEight % kLanes);
      UNROLL for (int group = 0; group < kGroups; ++group) {
        const uint next_low = group + 1 < kGroups ? codes[group + 1 < kGroups ? group + 1 : 0].low : first_low;
        const uint offered = lane == 0 ? next_low : codes[group].low;
        codes[group].append(simd_shuffle(offered, group < kWhole ? next : next_of_last));
      }
      if constexpr (kAll > D) {
        if (lane == kLanes - 1) codes[kGroups - 1] = eight_codes<code, kAll>(words, 0, uint(first_column + D - 8));
      }
    }
    if constexpr (kRest > 0) codes[kWhole].drop(lane % kOfEight * kLastWidth);
  }
  METAL_FUNC float centroid(int group, int i, threadgroup const float* table) const {
    return table[codes[group].window(i)];
  }
};

// Finds the codes of a tile's keys. Keys from `count` on repeat the last one.
struct TileRows {
  device const uint* words;
  int token_words;
  int count;

  METAL_FUNC device const uint* at(int key) const { return words + int64_t(min(key, count - 1)) * token_words; }
};

// Computes scores += K Q^T for kTogether blocks of 8 keys, over one group of columns.
template <int kWidth, int kTogether, int code, int D>
METAL_FUNC void multiply_keys_of_group(
    thread float2* scores,
    thread const SharedCodes<code, D, 4>* keys,
    int group,
    StagedQuery query,
    threadgroup const float* table) {
  UNROLL for (int i = 0; i < kWidth / 2; ++i) {
    const float2 right = query.one(group * 4 + i);
    UNROLL for (int n = 0; n < kTogether; ++n) {
      const float first = keys[n].centroid(group, i, table);
      multiply_add(scores[n], float2(first, keys[n].centroid(group, i + kWidth / 2, table)), right);
    }
  }
}

// Computes scores = K Q^T for kBlocks blocks of 8 keys.
template <int code, int D, int kBlocks>
METAL_FUNC void multiply_coded_keys(
    thread float2* scores, TileRows rows, StagedQuery query, threadgroup const float* table, LanePosition at) {
  typedef SharedCodes<code, D, 4> Codes;
  constexpr int kTogether = D <= 128 ? kBlocks : D == 256 ? 2 : 1;  // blocks whose codes are in registers
  UNROLL for (int first = 0; first < kBlocks; first += kTogether) {
    SharedCodes<code, D, 4> keys[kTogether];
    UNROLL for (int n = 0; n < kTogether; ++n) {
      scores[first + n] = float2(0.0f);
      keys[n].template load<D>(rows.at((first + n) * 8 + at.row), 0, at);
    }
    UNROLL for (int group = 0; group < Codes::kWhole; ++group) {
      multiply_keys_of_group<8, kTogether>(scores + first, keys, group, query, table);
    }
    if constexpr (Codes::kRest > 0) {
      multiply_keys_of_group<Codes::kLastWidth, kTogether>(scores + first, keys, Codes::kWhole, query, table);
    }
  }
}

// Computes o += V^T weights for a lane's two values in a block of 8 keys, over one group of columns.
template <int kWidth, int code, int D>
METAL_FUNC void multiply_values_of_group(
    thread float2* o,
    float2 weights,
    thread const SharedCodes<code, D, 8>* values,
    int group,
    threadgroup const float* table) {
  UNROLL for (int i = 0; i < kWidth; ++i) {
    const float2 left = float2(values[0].centroid(group, i, table), values[1].centroid(group, i, table));
    multiply_add(o[group * 8 + i], left, weights);
  }
}

// Computes o += V^T weights for D columns from `first_column` on.
template <int code, int kAll, int D, int kBlocks>
METAL_FUNC void multiply_coded_values(
    thread float2* o,
    thread const float2* weights,
    TileRows rows,
    int first_column,
    threadgroup const float* table,
    LanePosition at) {
  typedef SharedCodes<code, D, 8> Codes;
  UNROLL for (int n = 0; n < kBlocks; ++n) {
    SharedCodes<code, D, 8> values[2];
    UNROLL for (int i = 0; i < 2; ++i) {
      values[i].template load<kAll>(rows.at(n * 8 + at.column + i), first_column, at);
    }
    UNROLL for (int group = 0; group < Codes::kWhole; ++group) {
      multiply_values_of_group<8>(o, weights[n], values, group, table);
    }
    if constexpr (Codes::kRest > 0) {
      multiply_values_of_group<Codes::kLastWidth>(o, weights[n], values, Codes::kWhole, table);
    }
  }
}

// Loads the norms of a lane's keys: one in each block of 8. `norm` points to the norm of key 0.
template <int kBlocks>
METAL_FUNC void load_norms(thread float* norms, device const half* norm, int64_t stride, int first, int last) {
  UNROLL for (int n = 0; n < kBlocks; ++n) norms[n] = float(norm[min(first + n * 8, last) * stride]);
}

// Turns products with centroids into scores, and the weights of keys into those of the values' centroids.
template <int kBlocks>
struct NormedKeys {
  float norms[kBlocks], norms_of_values[kBlocks];
  float2 tile_score;

  METAL_FUNC float score(float dot, int n, int i) const { return fma(dot, norms[n], tile_score[i]); }
  METAL_FUNC float weight(float weight, int n) const { return weight * norms_of_values[n]; }
};

template <int key_code, int value_code, int D>
[[kernel]] void aura_flash_p1_eight(
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
  constexpr int kOwn = smaller(D, kEightColumns);  // columns of o
  constexpr int kBlocks = kEightKeys / 8;
  constexpr int kSimdgroups = kAuraThreads / 32;
  constexpr int kRound = kSimdgroups * kEightKeys;  // keys
  static_assert(D % 16 == 0 && D % kOwn == 0, "a vector is whole pairs of eights, and whole groups of columns");
  static_assert(kEightRows == 8, "the rows are a fragment's columns");
  threadgroup float2 shared[D * 4 + kSimdgroups * 8];  // q, and later o of a simdgroup; the simdgroups' states
  threadgroup float key_table[entries_of(key_code)];
  threadgroup float value_table[entries_of(value_code)];

  const FlashTile tile = flash_tile<kEightRows, D, kOwn>(parameters, group);
  stage_table(key_table, key_codebook, entries_of(key_code), thread_index, kAuraThreads);
  stage_table(value_table, value_codebook, entries_of(value_code), thread_index, kAuraThreads);
  stage_queries<float, D, 8>(shared, q_rot, parameters, tile, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // `needed` are the keys that any row sees, and `seen` those that the lane's two rows see.
  const KeyRange whole = block_range(parameters, tile.block);
  const KeyRange needed = range_of_rows<kEightKeys>(parameters, starts, tile, whole);
  const LanePosition at = lane_position(lane);
  SeenKeys seen;
  TileScores own_tile_scores[2];
  UNROLL for (int i = 0; i < 2; ++i) {
    const int row = min(tile.first_row + at.column + i, tile.last_row);
    const KeyRange range = visible_range(parameters, starts, tile.batch, row, whole);
    seen.first[i] = range.first;
    seen.last[i] = range.last;
    own_tile_scores[i] = tile_scores_of(tile_scores, parameters, row_place(parameters, tile, row));
  }

  RowState state = no_keys();
  float2 o[kOwn / 8];
  UNROLL for (int part = 0; part < kOwn / 8; ++part) o[part] = float2(0.0f);
  const StagedQuery query{shared, lane};
  device const half* own_key_norms = key_norms + offset_of(parameters.key_norms, tile.batch, tile.kv_head, 0);
  device const half* own_value_norms = value_norms + offset_of(parameters.value_norms, tile.batch, tile.kv_head, 0);
  for (int round = needed.first; round < needed.last; round += kRound) {
    const int first = round + int(simdgroup) * kEightKeys;  // may lie past the last key; all weights are then 0
    const int base = min(first, needed.last - 1);
    const int count = needed.last - base;
    NormedKeys<kBlocks> normed;
    load_norms<kBlocks>(normed.norms, own_key_norms, parameters.key_norms.token, first + at.row, needed.last - 1);
    load_norms<kBlocks>(
        normed.norms_of_values, own_value_norms, parameters.value_norms.token, first + at.row, needed.last - 1);
    float2 scores[kBlocks];
    const TileRows keys{
        key_codes + offset_of(parameters.key_codes, tile.batch, tile.kv_head, base), int(parameters.key_codes.token),
        count};
    multiply_coded_keys<key_code, D, kBlocks>(scores, keys, query, key_table, at);
    normed.tile_score = float2(own_tile_scores[0].at(base), own_tile_scores[1].at(base));
    const float2 rescale = online_softmax<kBlocks>(scores, state, normed, first + at.row, seen);
    UNROLL for (int part = 0; part < kOwn / 8; ++part) o[part] *= rescale;
    const TileRows values{
        value_codes + offset_of(parameters.value_codes, tile.batch, tile.kv_head, base),
        int(parameters.value_codes.token), count};
    multiply_coded_values<value_code, D, kOwn, kBlocks>(o, scores, values, tile.first_column, value_table, at);
  }
  merge_simdgroups<kOwn, kSimdgroups, D * 4>(o, state, shared, at, simdgroup, lane);
  if (simdgroup > 0) return;
  store_partials<D, kOwn, 8>({o_partials, m_partials, l_partials}, o, state, parameters, tile, tile.block, at);
}
