// Rotates vectors:
//     Pi = H diag(signs) / sqrt(D),    H = H_m (x) Sylvester's matrix of size D / m.
// Lane p of the lanes_of(D) that share a vector holds elements p, p + lanes, ... H_m (or Sylvester's matrix) combines
// elements of one lane. Sylvester's matrix combines lanes by shuffles. So the D log D additions need no barrier and no
// memory.
#pragma once
#include <metal_stdlib>

#include "aura/parameters.h"
#include "core/fragment.h"
using namespace metal;

// Returns the index in the vector of a lane's i-th element.
template <int D>
METAL_FUNC int place_of(int i, uint lane) {
  return i * lanes_of(D) + int(lane) % lanes_of(D);
}

template <int D>
METAL_FUNC float sum_over_lanes(float x) {
  UNROLL for (ushort step = 1; step < lanes_of(D); step *= 2) x += simd_shuffle_xor(x, step);
  return x;
}

template <int D>
METAL_FUNC float max_over_lanes(float x) {
  UNROLL for (ushort step = 1; step < lanes_of(D); step *= 2) x = fmax(x, simd_shuffle_xor(x, step));
  return x;
}

// Returns a mask whose bit r is set if r is a square modulo the prime q, which is 11 or 19.
METAL_FUNC constexpr uint squares_modulo(int q) { return q == 11 ? 0x23Au : 0x30AF2u; }

// Paley's Hadamard matrix of order m = q + 1 is the identity plus a skew matrix.
METAL_FUNC constexpr bool paley_is_positive(int m, int i, int j) {
  return i == 0 || i == j || (j != 0 && ((squares_modulo(m - 1) >> ((j - i + m - 1) % (m - 1))) & 1u) != 0);
}

template <int m, bool kTransposed>
METAL_FUNC void multiply_by_paley(thread float* values) {
  static_assert(m == 12 || m == 20, "Paley's matrices here have order 12 or 20");
  float in[m];
  UNROLL for (int i = 0; i < m; ++i) in[i] = values[i];
  UNROLL for (int i = 0; i < m; ++i) {
    float sum = 0.0f;
    UNROLL for (int j = 0; j < m; ++j) {
      sum += (kTransposed ? paley_is_positive(m, j, i) : paley_is_positive(m, i, j)) ? in[j] : -in[j];
    }
    values[i] = sum;
  }
}

template <int kCount>
METAL_FUNC void multiply_by_sylvester(thread float* values) {
  UNROLL for (int half_size = 1; half_size < kCount; half_size *= 2) {
    UNROLL for (int i = 0; i < kCount; ++i) {
      if ((i & half_size) == 0) {
        const float first = values[i];
        const float second = values[i + half_size];
        values[i] = first + second;
        values[i + half_size] = first - second;
      }
    }
  }
}

// Computes values <- H values, or H^T values, for the D / lanes_of(D) elements of each lane. Every lane must call.
template <int D, bool kTransposed>
METAL_FUNC void multiply_by_hadamard(thread float* values, uint lane) {
  static_assert(
      D == 64 || D == 80 || D == 96 || D == 128 || D == 256 || D == 512, "a vector has 64, 80, 96, 128, 256 or 512");
  constexpr int kOwn = D / lanes_of(D);
  UNROLL for (ushort step = 1; step < lanes_of(D); step *= 2) {
    const bool is_second = (ushort(lane) & step) != 0;
    UNROLL for (int i = 0; i < kOwn; ++i) {
      const float other = simd_shuffle_xor(values[i], step);
      values[i] = is_second ? other - values[i] : values[i] + other;
    }
  }
  if constexpr (D == 80 || D == 96) {
    multiply_by_paley<kOwn, kTransposed>(values);
  } else {
    multiply_by_sylvester<kOwn>(values);
  }
}

template <int D>
METAL_FUNC void multiply_by_signs(thread float* values, device const float* signs, uint lane) {
  UNROLL for (int i = 0; i < D / lanes_of(D); ++i) values[i] *= signs[place_of<D>(i, lane)];
}

// Computes values <- sqrt(D) Pi values, or sqrt(D) Pi^T values with kInverse.
template <int D, bool kInverse>
METAL_FUNC void rotate(thread float* values, device const float* signs, uint lane) {
  if constexpr (!kInverse) multiply_by_signs<D>(values, signs, lane);
  multiply_by_hadamard<D, kInverse>(values, lane);
  if constexpr (kInverse) multiply_by_signs<D>(values, signs, lane);
}

// Says which vector a lane works on. Lanes past the last vector repeat it, and their `present` is false.
struct VectorPlace {
  int64_t index;
  int batch, head, token;
  bool present;
};

METAL_FUNC VectorPlace place_of_vector(constant VectorParameters& vectors, int64_t vector) {
  const int index = int(min(vector, int64_t(vectors.count - 1)));
  const int head = index / vectors.tokens;  // of all batch rows
  return {index, head / vectors.heads, head % vectors.heads, index % vectors.tokens, vector < vectors.count};
}

template <int D>
METAL_FUNC VectorPlace vector_place(constant VectorParameters& vectors, uint group, uint simdgroup, uint lane) {
  constexpr int kOfSimdgroup = 32 / lanes_of(D);
  return place_of_vector(
      vectors, (int64_t(group) * (kAuraThreads / 32) + simdgroup) * kOfSimdgroup + int(lane) / lanes_of(D));
}

METAL_FUNC int64_t offset_of(constant VectorStrides& strides, int batch, int64_t head, int token) {
  return batch * strides.batch + head * strides.head + token * strides.token;
}
