// Attention of 8 query rows, a simdgroup's, to some keys, in fragments whose columns are the rows: scores [keys, rows]
// = K Q^T, o [D, rows] += V^T weights. So a lane holds two rows, of all fragments, and weights are the right side of
// the second product as they come out of the first. Which elements of D make a fragment is chosen so that a lane loads
// neighbours: both products sum over keys or D in any order.
#pragma once
#include "attention/paged_attention.h"
#include "core/vectors.h"

template <typename C>
METAL_FUNC float4 load_four(device const C* source, bool has_vectors) {
  if (has_vectors) return float4(*(device const vec<C, 4>*)source);
  return float4(float(source[0]), float(source[1]), float(source[2]), float(source[3]));
}

template <typename C>
METAL_FUNC float4 load_four(threadgroup const C* source, bool) {
  return float4(*(threadgroup const vec<C, 4>*)source);
}

template <typename C>
METAL_FUNC float2 load_two(device const C* source, bool has_vectors) {
  if (has_vectors) return float2(*(device const vec<C, 2>*)source);
  return float2(float(source[0]), float(source[1]));
}

template <typename C>
METAL_FUNC float2 load_two(threadgroup const C* source, bool) {
  return float2(*(threadgroup const vec<C, 2>*)source);
}

// Fragment `part` of a query: element `row` of it is column_of_query() of q. Of 16 columns a lane of the keys has four.
METAL_FUNC int column_of_query(int part, int row) { return part / 2 * 16 + row / 2 * 4 + part % 2 * 2 + row % 2; }

// Two rows of q, fragment by fragment, in the dtype of q; a row that is not there is zeros.
template <typename T, int D>
METAL_FUNC void load_query(
    thread vec<T, 2>* query, device const T* first, device const T* second, bool has_first, bool has_second, int row) {
  UNROLL for (int part = 0; part < D / 8; ++part) {
    const int column = column_of_query(part, row);
    query[part] = vec<T, 2>(has_first ? first[column] : T(0), has_second ? second[column] : T(0));
  }
}

// scores = K Q^T of kBlocks blocks of 8 keys; keys[n]: the lane's key of block n, from its column on.
template <int D, int kBlocks, typename T, typename Pointer>
METAL_FUNC void multiply_keys(
    thread float2* scores, thread const Pointer* keys, thread const vec<T, 2>* query, bool has_vectors) {
  UNROLL for (int n = 0; n < kBlocks; ++n) scores[n] = float2(0.0f);
  UNROLL for (int part = 0; part < D / 8; part += 2) {
    const float2 first = float2(query[part]);
    const float2 second = float2(query[part + 1]);
    UNROLL for (int n = 0; n < kBlocks; ++n) {
      const float4 key = load_four(keys[n] + part * 8, has_vectors);
      multiply_add(scores[n], key.xy, first);
      multiply_add(scores[n], key.zw, second);
    }
  }
}

// o += V^T weights; first[n] and second[n]: the lane's two keys of block n. Fragments 4 i .. 4 i + 3 of o have columns
// 32 i + 4 row .. 32 i + 4 row + 3 of V, the last two where D is no multiple of 32 columns 2 row and 2 row + 1 of the
// rest.
template <int D, int kBlocks, typename Pointer>
METAL_FUNC void multiply_values(
    thread float2* o,
    thread const float2* weights,
    thread const Pointer* first,
    thread const Pointer* second,
    int row,
    bool has_vectors) {
  UNROLL for (int column = 0; column + 32 <= D; column += 32) {
    UNROLL for (int n = 0; n < kBlocks; ++n) {
      const float4 left = load_four(first[n] + column + row * 4, has_vectors);
      const float4 right = load_four(second[n] + column + row * 4, has_vectors);
      UNROLL for (int i = 0; i < 4; ++i) multiply_add(o[column / 8 + i], float2(left[i], right[i]), weights[n]);
    }
  }
  if constexpr (D % 32 != 0) {
    constexpr int kColumn = D / 32 * 32;
    UNROLL for (int n = 0; n < kBlocks; ++n) {
      const float2 left = load_two(first[n] + kColumn + row * 2, has_vectors);
      const float2 right = load_two(second[n] + kColumn + row * 2, has_vectors);
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

METAL_FUNC float shrinkage(float before, float largest) { return largest > -INFINITY ? exp(before - largest) : 1.0f; }

// Products -> weights; -inf and 0 for keys that a row does not see. `first`: the key of the lane in block 0, of which
// those from `last` on are repeated ones. Returns what o so far is multiplied by. Every lane calls.
template <int kBlocks>
METAL_FUNC float2 online_softmax(
    thread float2* scores, thread RowState& state, float scale, int first, int last, int2 seen_from, int2 seen_to) {
  float2 largest = state.m;
  UNROLL for (int n = 0; n < kBlocks; ++n) {
    const int key = first + n * 8;
    UNROLL for (int i = 0; i < 2; ++i) {
      const bool is_seen = key < last && key >= seen_from[i] && key < seen_to[i];
      scores[n][i] = is_seen ? scores[n][i] * scale : -INFINITY;
      if (scores[n][i] > largest[i]) largest[i] = scores[n][i];
    }
  }
  largest = max_over_keys(largest);
  const float2 decay = float2(shrinkage(state.m.x, largest.x), shrinkage(state.m.y, largest.y));
  float2 sum = float2(0.0f);
  UNROLL for (int n = 0; n < kBlocks; ++n) {
    UNROLL for (int i = 0; i < 2; ++i) {
      const float weight = scores[n][i] != -INFINITY ? exp(scores[n][i] - largest[i]) : 0.0f;
      sum[i] += weight;
      scores[n][i] = weight;
    }
  }
  state.m = largest;
  state.l = state.l * decay + sum_over_keys(sum);
  return decay;
}
