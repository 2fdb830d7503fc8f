// One threadgroup owns 8 query rows of one KV head, one block of keys and up to 256 columns of o. The simdgroups take
// tiles of 32 keys in turn, and meet once, after the last key:
//     scores [keys, rows] = K Q^T,    o [D, rows] += V^T weights.
// A lane decodes codes straight into its elements of K and V (core/row_attention.h), so a simdgroup decodes each code
// once, and only q lies in threadgroup memory. In registers: scores [32, 8], o [columns, 8].
// Layout: codes [B, HK, T, words], norms [B, HK, T] f16, q_rot [B, HQ, L, D] f32, all with strides; tile_scores [B, HQ,
// L, tiles], o_partials [B, HQ, L, NB, D], m and l [B, HQ, L, NB] f32, contiguous.
#include "aura/aura_flash_p1_eight.h"
#include "aura/codes.h"
#include "aura/stage_queries.h"
#include "aura/visibility.h"
#include "core/row_attention.h"

METAL_FUNC constexpr int smaller(int a, int b) { return a < b ? a : b; }

// Reads centroids of a tile's `count` keys, from a column on. Later keys repeat the last one.
template <int code, int D>
struct CodedRows {
  device const uint* words;
  int token_words;
  int count;
  int first_column;
  threadgroup const float* table;

  METAL_FUNC uint codes_at(int key, int column) const {
    return four_codes<code, D>(words, int64_t(min(key, count - 1)) * token_words, uint(first_column + column));
  }
  METAL_FUNC float4 four(int key, int column) const { return centroids_of<code>(codes_at(key, column), table); }
  METAL_FUNC float2 two(int key, int column) const {
    const uint codes = codes_at(key, column / 4 * 4) >> uint(column % 4 * bits_of(code));
    return float2(table[window_in<code>(codes)], table[window_in<code>(codes >> uint(bits_of(code)))]);
  }
};

// Loads the norms of the keys that a lane has in a fragment: one of each 8. `norm` is of key 0, with a stride.
template <int kBlocks>
METAL_FUNC void load_norms(thread float* norms, device const half* norm, int64_t stride, int first, int last) {
  UNROLL for (int n = 0; n < kBlocks; ++n) norms[n] = float(norm[min(first + n * 8, last) * stride]);
}

// Dot products -> scores, and the scores -> weights of the values' centroids. The weight of a key that a row does not
// see is 0, even where its norm is not finite. `first` is the lane's key in block 0. Returns the factor for o.
template <int kBlocks>
METAL_FUNC float2 weigh(
    thread float2* scores,
    thread RowState& state,
    thread const float* norms_of_keys,
    thread const float* norms_of_values,
    float2 tile_score,
    int first,
    SeenKeys seen) {
  float2 largest = state.m;
  UNROLL for (int n = 0; n < kBlocks; ++n) {
    UNROLL for (int i = 0; i < 2; ++i) {
      const int key = first + n * 8;
      const bool is_seen = key >= seen.first[i] && key < seen.last[i];
      scores[n][i] = is_seen ? fma(scores[n][i], norms_of_keys[n], tile_score[i]) : -INFINITY;
      if (scores[n][i] > largest[i]) largest[i] = scores[n][i];
    }
  }
  largest = max_over_keys(largest);
  const float2 rescale = float2(rescale_factor(state.m.x, largest.x), rescale_factor(state.m.y, largest.y));
  float2 sum = float2(0.0f);
  UNROLL for (int n = 0; n < kBlocks; ++n) {
    UNROLL for (int i = 0; i < 2; ++i) {
      const bool is_seen = scores[n][i] != -INFINITY;
      const float weight = is_seen ? exp(scores[n][i] - largest[i]) : 0.0f;
      sum[i] += weight;
      scores[n][i] = is_seen ? weight * norms_of_values[n] : 0.0f;
    }
  }
  state.m = largest;
  state.l = state.l * rescale + sum_over_keys(sum);
  return rescale;
}

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
  static_assert(D % 16 == 0 && D % kOwn == 0, "a vector is whole pairs of fragments, and whole groups of columns");
  static_assert(kEightRows == 8, "the rows are a fragment's columns");
  threadgroup float2 shared[D * 4];  // q, then o of a simdgroup
  threadgroup float2 states[kSimdgroups * 8];
  threadgroup float key_table[entries_of(key_code)];
  threadgroup float value_table[entries_of(value_code)];

  const int row_tiles = (parameters.rows + kEightRows - 1) / kEightRows;
  const int block = int(group.x) / (D / kOwn);
  const int first_column = int(group.x) % (D / kOwn) * kOwn;
  const int kv_head = int(group.y) / row_tiles;
  const int first_row = int(group.y) % row_tiles * kEightRows;
  const int last_row = min(first_row + kEightRows, parameters.rows) - 1;
  const int batch = int(group.z);
  stage_table(key_table, key_codebook, entries_of(key_code), thread_index, kAuraThreads);
  stage_table(value_table, value_codebook, entries_of(value_code), thread_index, kAuraThreads);
  stage_queries<float, D>(shared, q_rot, parameters, batch, kv_head, first_row, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // The keys that any row sees, and those that the lane's two rows see.
  const KeyRange whole = block_range(parameters, block);
  const KeyRange needed = range_of_rows<kEightKeys>(parameters, starts, batch, first_row, last_row, whole);
  const LanePosition at = lane_position(lane);
  const int own_row = first_row + at.column;
  SeenKeys seen;
  TileScores own_tile_scores[2];
  UNROLL for (int i = 0; i < 2; ++i) {
    const int row = min(own_row + i, last_row);
    const KeyRange range = visible_range(parameters, starts, batch, row, whole);
    seen.first[i] = range.first;
    seen.last[i] = range.last;
    own_tile_scores[i] = tile_scores_of(tile_scores, parameters, row_place(parameters, batch, kv_head, row));
  }

  RowState state = no_keys();
  float2 o[kOwn / 8];
  UNROLL for (int part = 0; part < kOwn / 8; ++part) o[part] = float2(0.0f);
  StagedQuery query;
  query.staged = shared;
  query.lane = lane;
  CodedRows<key_code, D> keys;
  keys.first_column = 0;
  keys.table = key_table;
  keys.token_words = int(parameters.key_codes.token);
  CodedRows<value_code, D> values;
  values.first_column = first_column;
  values.table = value_table;
  values.token_words = int(parameters.value_codes.token);
  device const half* own_key_norms = key_norms + offset_of(parameters.key_norms, batch, kv_head, 0);
  device const half* own_value_norms = value_norms + offset_of(parameters.value_norms, batch, kv_head, 0);
  for (int round = needed.first; round < needed.last; round += kRound) {
    const int first = round + int(simdgroup) * kEightKeys;  // may lie past the last key; all weights are then 0
    const int base = min(first, needed.last - 1);
    keys.words = key_codes + offset_of(parameters.key_codes, batch, kv_head, base);
    keys.count = needed.last - base;
    float norms_of_keys[kBlocks];
    float norms_of_values[kBlocks];
    load_norms<kBlocks>(norms_of_keys, own_key_norms, parameters.key_norms.token, first + at.row, needed.last - 1);
    load_norms<kBlocks>(
        norms_of_values, own_value_norms, parameters.value_norms.token, first + at.row, needed.last - 1);
    float2 scores[kBlocks];
    multiply_keys<D, kBlocks>(scores, keys, query, at);
    const float2 tile_score = float2(own_tile_scores[0].at(base), own_tile_scores[1].at(base));
    const float2 rescale =
        weigh<kBlocks>(scores, state, norms_of_keys, norms_of_values, tile_score, first + at.row, seen);
    UNROLL for (int part = 0; part < kOwn / 8; ++part) o[part] *= rescale;
    values.words = value_codes + offset_of(parameters.value_codes, batch, kv_head, base);
    values.count = keys.count;
    multiply_values<kOwn, kBlocks>(o, scores, values, at);
  }
  merge_simdgroups<kOwn, kSimdgroups>(o, state, shared, states, at, simdgroup, lane);
  if (simdgroup > 0) return;
  UNROLL for (int i = 0; i < 2; ++i) {
    if (own_row + i <= last_row) {
      const int64_t target = row_place(parameters, batch, kv_head, own_row + i).index * parameters.blocks + block;
      store_row<kOwn>(o_partials + target * D + first_column, o, i, 1.0f, at.row);
      if (first_column == 0 && at.row == 0) {
        m_partials[target] = state.m[i];
        l_partials[target] = state.l[i];
      }
    }
  }
}
