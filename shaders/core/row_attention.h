// Attention of 8 query rows to some keys, computed by one simdgroup. The columns of fragments are the query rows:
//     scores [keys, rows] = K Q^T,    o [D, rows] += V^T weights.
// In every fragment, a lane holds the same two query rows. The first product leaves the weights where the second one
// needs them. Both products may sum over keys and over D in any order. A fragment therefore takes the elements of D
// that let a lane load kWidth neighbours. If D is not a multiple of what all lanes load, a lane loads fewer neighbours
// of the last columns.
#pragma once
#include "core/fragment.h"

// Returns the column of D that fragment `part` has in row `depth` of Q^T. 4 lanes share the columns of a key. A
// fragment of K takes neighbours i and i + width / 2 of each lane.
template <int D, int kWidth>
METAL_FUNC constexpr int column_of_query(int part, int depth) {
  constexpr int kWhole = D / (4 * kWidth) * (4 * kWidth);
  const bool is_rest = part * 8 >= kWhole;
  const int width = is_rest ? (D - kWhole) / 4 : kWidth;
  const int first = is_rest ? kWhole : part * 8 / (4 * kWidth) * (4 * kWidth);
  return first + depth / 2 * width + (part - first / 8) + depth % 2 * (width / 2);
}

// Returns the column of D that fragment `part` has in row `row` of V^T. 8 lanes share the columns of a value.
template <int D, int kWidth>
METAL_FUNC constexpr int column_of_value(int part, int row) {
  constexpr int kWhole = D / (8 * kWidth) * (8 * kWidth);
  const bool is_rest = part * 8 >= kWhole;
  const int width = is_rest ? (D - kWhole) / 8 : kWidth;
  const int first = is_rest ? kWhole : part * 8 / (8 * kWidth) * (8 * kWidth);
  return first + row * width + (part - first / 8);
}

// Reads rows in threadgroup memory.
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

// Both functions load neighbours of a row in device memory, with one load if `has_vectors`.
template <typename T>
METAL_FUNC float4 load_four(device const T* source, bool has_vectors) {
  if (has_vectors) return float4(*(device const vec<T, 4>*)source);
  return float4(float(source[0]), float(source[1]), float(source[2]), float(source[3]));
}

template <typename T>
METAL_FUNC float2 load_two(device const T* source, bool has_vectors) {
  if (has_vectors) return float2(*(device const vec<T, 2>*)source);
  return float2(float(source[0]), float(source[1]));
}

// A lane's elements of q in two fragments. Each fragment has one element of each of the lane's two rows.
template <typename T>
struct QueryParts {
  vec<T, 2> first, second;
};

// Reads queries that are staged in threadgroup memory: the elements of all lanes in fragment 0, then those in fragment
// 1, and so on.
struct StagedQuery {
  typedef float Element;
  threadgroup const float2* staged;
  uint lane;

  METAL_FUNC float2 one(int part) const { return staged[part * 32 + int(lane)]; }
  METAL_FUNC QueryParts<float> parts(int part) const { return {one(part), one(part + 1)}; }
};

// Computes scores = K Q^T for kBlocks blocks of 8 keys.
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

// Computes o += V^T weights. Fragments 4 i .. 4 i + 3 of o have columns 32 i + 4 row .. 32 i + 4 row + 3 of V. If D is
// not a multiple of 32, the last two fragments have columns 2 row and 2 row + 1 of the rest.
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

// Where a row's o, largest score and sum of exp(score - largest) go if its keys are divided.
struct Partials {
  device float* o;
  device float* m;
  device float* l;
};

// For each of a lane's two rows, the largest score and the sum of exp(score - largest).
struct RowState {
  float2 m, l;
};

METAL_FUNC RowState no_keys() { return {float2(-INFINITY), float2(0.0f)}; }

// Reduces over the 8 lanes that hold the same pair of rows.
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

// Returns exp(before - largest), the factor for a sum whose largest score grows. Without any score the sum is 0, and
// the factor is 1.
METAL_FUNC float rescale_factor(float before, float largest) {
  return largest > -INFINITY ? exp(before - largest) : 1.0f;
}

METAL_FUNC float2 rescale_factor(float2 before, float2 largest) {
  return float2(rescale_factor(before.x, largest.x), rescale_factor(before.y, largest.y));
}

// The keys that a lane's two rows may see.
struct SeenKeys {
  int2 first, last;
};

// Scores are scaled products, and weights are those of the values.
struct ScaledKeys {
  float scale;

  METAL_FUNC float score(float dot, int, int) const { return dot * scale; }
  METAL_FUNC float weight(float weight, int) const { return weight; }
};

// Turns the products of a lane's key in block n and of the lane's row i into scores, and these into weights. A key that
// a row may not see gets weight 0, even if its norm is not finite. Keys that are repeated to fill a tile lie past the
// last key, so they get weight 0 too. `first` is the lane's key in block 0. Returns the factor for o. Every lane must
// call this.
template <int kBlocks, typename Keys>
METAL_FUNC float2
online_softmax(thread float2* scores, thread RowState& state, thread const Keys& keys, int first, SeenKeys seen) {
  float2 largest = state.m;
  UNROLL for (int n = 0; n < kBlocks; ++n) {
    const int key = first + n * 8;
    UNROLL for (int i = 0; i < 2; ++i) {
      const bool is_seen = key >= seen.first[i] && key < seen.last[i];
      scores[n][i] = is_seen ? keys.score(scores[n][i], n, i) : -INFINITY;
      if (scores[n][i] > largest[i]) largest[i] = scores[n][i];
    }
  }
  largest = max_over_keys(largest);
  const float2 rescale = rescale_factor(state.m, largest);
  float2 sum = float2(0.0f);
  UNROLL for (int n = 0; n < kBlocks; ++n) {
    UNROLL for (int i = 0; i < 2; ++i) {
      const bool is_seen = scores[n][i] != -INFINITY;
      const float weight = is_seen ? exp(scores[n][i] - largest[i]) : 0.0f;
      sum[i] += weight;
      scores[n][i] = is_seen ? keys.weight(weight, n) : 0.0f;
    }
  }
  state.m = largest;
  state.l = state.l * rescale + sum_over_keys(sum);
  return rescale;
}

// Merges the results of all simdgroups into simdgroup 0. Every thread must call this. An element of `shared` is a
// lane's part of a fragment. The states lie behind kStaged elements, which other simdgroups may still read.
template <int D, int kSimdgroups, int kStaged>
METAL_FUNC void merge_simdgroups(
    thread float2* o, thread RowState& state, threadgroup float2* shared, LanePosition at, uint simdgroup, uint lane) {
  threadgroup float2* states = shared + kStaged;
  if (at.row == 0) {
    states[(int(simdgroup) * 2) * 4 + at.column / 2] = state.m;
    states[(int(simdgroup) * 2 + 1) * 4 + at.column / 2] = state.l;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float2 own = state.m;
  RowState whole = no_keys();
  UNROLL for (int i = 0; i < kSimdgroups; ++i) whole.m = fmax(whole.m, states[i * 8 + at.column / 2]);
  UNROLL for (int i = 0; i < kSimdgroups; ++i) {
    whole.l += states[i * 8 + 4 + at.column / 2] * rescale_factor(states[i * 8 + at.column / 2], whole.m);
  }
  state = whole;
  const float2 factor = rescale_factor(own, whole.m);
  UNROLL for (int part = 0; part < D / 8; ++part) o[part] *= factor;
  UNROLL for (int other = 1; other < kSimdgroups; ++other) {
    if (int(simdgroup) == other) {
      UNROLL for (int part = 0; part < D / 8; ++part) shared[part * 32 + int(lane)] = o[part];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup == 0) {
      UNROLL for (int part = 0; part < D / 8; ++part) o[part] += shared[part * 32 + int(lane)];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// Stores row `i` of the lane's two rows.
template <int D, int kWidth = 4, typename T>
METAL_FUNC void store_row(device T* target, thread const float2* o, int i, float factor, int row) {
  UNROLL for (int part = 0; part < D / 8; ++part) {
    target[column_of_value<D, kWidth>(part, row)] = T((i == 0 ? o[part].x : o[part].y) * factor);
  }
}
