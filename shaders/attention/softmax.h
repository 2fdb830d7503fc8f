// Attention of 8 query rows, a simdgroup's, to some keys, in fragments whose columns are the rows: scores [keys, rows]
// = K Q^T, o [D, rows] += V^T weights. So a lane holds two rows, of all fragments, and weights are the right side of
// the second product as they come out of the first. Which elements of D make a fragment is chosen so that a lane loads
// neighbours: both products sum over keys or D in any order.
#pragma once
#include "attention/sequences.h"

// Rows of pages, `offsets` elements into the cache.
template <typename C>
struct PagedRows {
  device const C* cache;
  threadgroup const int64_t* offsets;
  bool has_vectors;

  METAL_FUNC float4 four(int key, int column) const {
    device const C* source = cache + offsets[key] + column;
    if (has_vectors) return float4(*(device const vec<C, 4>*)source);
    return float4(float(source[0]), float(source[1]), float(source[2]), float(source[3]));
  }
  METAL_FUNC float2 two(int key, int column) const {
    device const C* source = cache + offsets[key] + column;
    if (has_vectors) return float2(*(device const vec<C, 2>*)source);
    return float2(float(source[0]), float(source[1]));
  }
};

// Rows in threadgroup memory.
template <typename C, int kStride>
struct StagedRows {
  threadgroup const C* tile;

  METAL_FUNC float4 four(int key, int column) const {
    return float4(*(threadgroup const vec<C, 4>*)(tile + key * kStride + column));
  }
  METAL_FUNC float2 two(int key, int column) const {
    return float2(*(threadgroup const vec<C, 2>*)(tile + key * kStride + column));
  }
};

// What a lane has of q in a fragment and the next one: an element each of its two rows.
template <typename T>
struct QueryParts {
  vec<T, 2> first, second;
};

// A lane's two query rows; one that is not there is zeros.
template <typename T>
struct QueryRows {
  device const T* first;
  device const T* second;
  bool has_first, has_second;
  int row;  // of a fragment

  // Of 16 columns a lane of the keys has four, and one of the queries two neighbours: one in each fragment.
  METAL_FUNC QueryParts<T> parts(int part) const {
    const int64_t column = int64_t(part) * 8 + int64_t(row) * 2;
    vec<T, 2> of_first = vec<T, 2>(T(0), T(0));
    vec<T, 2> of_second = vec<T, 2>(T(0), T(0));
    if (has_first) of_first = *(device const vec<T, 2>*)(first + column);
    if (has_second) of_second = *(device const vec<T, 2>*)(second + column);
    QueryParts<T> both;
    both.first = vec<T, 2>(of_first.x, of_second.x);
    both.second = vec<T, 2>(of_first.y, of_second.y);
    return both;
  }
};

template <typename T>
METAL_FUNC QueryRows<T> query_rows(
    device const T* q, constant PagedParameters& parameters, RowTile tile, int kv_head, int own_row, int fragment_row) {
  const int first = tile.first_row + clamp(own_row, 0, max(tile.rows - 1, 0));
  const int second = tile.first_row + clamp(own_row + 1, 0, max(tile.rows - 1, 0));
  const int64_t head = int64_t(kv_head) * parameters.ratio;
  const int64_t first_token = tile.sequence.first + first / parameters.ratio;
  const int64_t second_token = tile.sequence.first + second / parameters.ratio;
  QueryRows<T> rows;
  rows.first = q + first_token * parameters.q.token + (head + first % parameters.ratio) * parameters.q.head;
  rows.second = q + second_token * parameters.q.token + (head + second % parameters.ratio) * parameters.q.head;
  rows.has_first = own_row < tile.rows;
  rows.has_second = own_row + 1 < tile.rows;
  rows.row = fragment_row;
  return rows;
}

// Queries in registers, in their own dtype, where they take no more than 256 bytes a row: 64 a lane. More spill, beside
// o and what the keys take, and are read again for each tile of keys.
template <typename T, int D>
struct HeldQuery {
  typedef T Element;
  enum { kHeld = D * int(sizeof(T)) <= 256 ? D / 8 : 0 };
  QueryRows<T> rows;
  vec<T, 2> held[kHeld + 1];

  METAL_FUNC void load(QueryRows<T> source) {
    rows = source;
    UNROLL for (int part = 0; part < kHeld; part += 2) {
      const QueryParts<T> both = rows.parts(part);
      held[part] = both.first;
      held[part + 1] = both.second;
    }
  }
  METAL_FUNC QueryParts<T> parts(int part) const {
    if (kHeld == 0) return rows.parts(part);
    QueryParts<T> both;
    both.first = held[kHeld > 0 ? part : 0];
    both.second = held[kHeld > 0 ? part + 1 : 0];
    return both;
  }
};

// Queries in threadgroup memory: the lanes' parts of fragment 0, of fragment 1, and so on.
struct StagedQuery {
  typedef float Element;
  threadgroup const float2* staged;
  uint lane;

  METAL_FUNC QueryParts<float> parts(int part) const {
    QueryParts<float> both;
    both.first = staged[part * 32 + int(lane)];
    both.second = staged[part * 32 + 32 + int(lane)];
    return both;
  }
};

// scores = K Q^T of kBlocks blocks of 8 keys.
template <int D, int kBlocks, typename Rows, typename Query>
METAL_FUNC void multiply_keys(thread float2* scores, Rows keys, thread const Query& query, LanePosition at) {
  UNROLL for (int n = 0; n < kBlocks; ++n) scores[n] = float2(0.0f);
  UNROLL for (int part = 0; part < D / 8; part += 2) {
    const QueryParts<typename Query::Element> both = query.parts(part);
    UNROLL for (int n = 0; n < kBlocks; ++n) {
      const float4 key = keys.four(n * 8 + at.row, part * 8 + at.column * 2);
      multiply_add(scores[n], float2(key[0], key[2]), float2(both.first));
      multiply_add(scores[n], float2(key[1], key[3]), float2(both.second));
    }
  }
}

// o += V^T weights. Fragments 4 i .. 4 i + 3 of o have columns 32 i + 4 row .. 32 i + 4 row + 3 of V, the last two
// where D is no multiple of 32 columns 2 row and 2 row + 1 of the rest.
template <int D, int kBlocks, typename Rows>
METAL_FUNC void multiply_values(thread float2* o, thread const float2* weights, Rows values, LanePosition at) {
  UNROLL for (int column = 0; column + 32 <= D; column += 32) {
    UNROLL for (int n = 0; n < kBlocks; ++n) {
      const float4 left = values.four(n * 8 + at.column, column + at.row * 4);
      const float4 right = values.four(n * 8 + at.column + 1, column + at.row * 4);
      UNROLL for (int i = 0; i < 4; ++i) multiply_add(o[column / 8 + i], float2(left[i], right[i]), weights[n]);
    }
  }
  if constexpr (D % 32 != 0) {
    constexpr int kColumn = D / 32 * 32;
    UNROLL for (int n = 0; n < kBlocks; ++n) {
      const float2 left = values.two(n * 8 + at.column, kColumn + at.row * 2);
      const float2 right = values.two(n * 8 + at.column + 1, kColumn + at.row * 2);
      UNROLL for (int i = 0; i < 2; ++i) multiply_add(o[kColumn / 8 + i], float2(left[i], right[i]), weights[n]);
    }
  }
}

// Of a lane's two rows, the largest score and the sum of exp(score - largest).
struct RowState {
  float2 m, l;
};

METAL_FUNC RowState no_keys() {
  RowState state;
  state.m = float2(-INFINITY);
  state.l = float2(0.0f);
  return state;
}

// Of the 8 lanes that hold one pair of rows.
METAL_FUNC float2 max_over_keys(float2 x) {
  x = fmax(x, simd_shuffle_xor(x, ushort(2)));
  x = fmax(x, simd_shuffle_xor(x, ushort(4)));
  return fmax(x, simd_shuffle_xor(x, ushort(16)));
}

METAL_FUNC float2 sum_over_keys(float2 x) {
  x += simd_shuffle_xor(x, ushort(2));
  x += simd_shuffle_xor(x, ushort(4));
  return x + simd_shuffle_xor(x, ushort(16));
}

METAL_FUNC float rescale_factor(float before, float largest) {
  return largest > -INFINITY ? exp(before - largest) : 1.0f;
}

// What a lane's two rows see.
struct SeenKeys {
  int2 first, last;
};

METAL_FUNC SeenKeys seen_by_lane(constant PagedParameters& parameters, RowTile tile, int own_row) {
  const KeyRange first = seen_by(parameters, tile.sequence, tile.first_row + min(own_row, tile.rows - 1));
  const KeyRange second = seen_by(parameters, tile.sequence, tile.first_row + min(own_row + 1, tile.rows - 1));
  SeenKeys seen;
  seen.first = int2(first.first, second.first);
  seen.last = int2(first.last, second.last);
  return seen;
}

// Products -> weights; 0 for keys that a row does not see, and so for those that are repeated to fill a tile, which lie
// beyond the last key. `first`: the lane's key of block 0. Returns what o so far is multiplied by. Every lane calls.
template <int kBlocks>
METAL_FUNC float2 online_softmax(thread float2* scores, thread RowState& state, float scale, int first, SeenKeys seen) {
  float2 largest = state.m;
  UNROLL for (int n = 0; n < kBlocks; ++n) {
    const int key = first + n * 8;
    UNROLL for (int i = 0; i < 2; ++i) {
      const bool is_seen = key >= seen.first[i] && key < seen.last[i];
      scores[n][i] = is_seen ? scores[n][i] * scale : -INFINITY;
      if (scores[n][i] > largest[i]) largest[i] = scores[n][i];
    }
  }
  largest = max_over_keys(largest);
  const float2 rescale = float2(rescale_factor(state.m.x, largest.x), rescale_factor(state.m.y, largest.y));
  float2 sum = float2(0.0f);
  UNROLL for (int n = 0; n < kBlocks; ++n) {
    UNROLL for (int i = 0; i < 2; ++i) {
      const float weight = scores[n][i] != -INFINITY ? exp(scores[n][i] - largest[i]) : 0.0f;
      sum[i] += weight;
      scores[n][i] = weight;
    }
  }
  state.m = largest;
  state.l = state.l * rescale + sum_over_keys(sum);
  return rescale;
}
