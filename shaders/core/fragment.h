// A fragment is an 8x8 block that the 32 lanes of a simdgroup hold. Each lane holds two neighbours of a row as a
// float2. Fragments are always f32, because 16-bit products are no faster on M1 to M4 (102 FMA per core and cycle).
#pragma once
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

#define UNROLL _Pragma("clang loop unroll(full)")

// The position of a lane's first element. The second element is in the next column.
struct LanePosition {
  int row;
  int column;
};

METAL_FUNC LanePosition lane_position(uint lane) {
  return {int(((lane >> 4) & 1) * 4 + ((lane >> 1) & 3)), int(((lane >> 3) & 1) * 4 + (lane & 1) * 2)};
}

// Returns the lane whose first element is at the given row and even column.
METAL_FUNC ushort lane_at(int row, int column) {
  return ushort((row >> 2) << 4 | (column >> 2) << 3 | (row & 3) << 1 | (column >> 1 & 1));
}

// accumulator += a * b
METAL_FUNC void multiply_add(thread float2& accumulator, float2 a, float2 b) {
  simdgroup_float8x8 left, right, sum;
  left.thread_elements()[0] = a.x;
  left.thread_elements()[1] = a.y;
  right.thread_elements()[0] = b.x;
  right.thread_elements()[1] = b.y;
  sum.thread_elements()[0] = accumulator.x;
  sum.thread_elements()[1] = accumulator.y;
  simdgroup_multiply_accumulate(sum, left, right, sum);
  accumulator = float2(sum.thread_elements()[0], sum.thread_elements()[1]);
}

// Both functions load a lane's two elements from threadgroup memory. The first element is at `own`. The second is the
// next one in memory, so that one load takes both, or it is one row further.
template <typename T>
METAL_FUNC float2 pair_at(threadgroup const T* own) {
  return float2(vec<T, 2>(*(threadgroup const vec<T, 2>*)own));
}

template <typename T>
METAL_FUNC float2 column_pair_at(threadgroup const T* own, int stride) {
  return float2(float(own[0]), float(own[stride]));
}

// Both functions load a fragment whose corner is at `origin`. The corner and the stride are even.
template <typename T>
METAL_FUNC float2 load_even_fragment(threadgroup const T* origin, int stride, LanePosition at) {
  return pair_at(origin + at.row * stride + at.column);
}

template <typename T>
METAL_FUNC float2 load_transposed(threadgroup const T* origin, int stride, LanePosition at) {
  return column_pair_at(origin + at.column * stride + at.row, stride);
}

// Loads whole rows of 8 from device memory. Rows from `rows` on are zeros.
template <typename T>
METAL_FUNC float2 load_even_fragment(device const T* origin, int64_t stride, int rows, LanePosition at) {
  float2 values = float2(0.0f);
  if (at.row < rows) values = float2(*(device const vec<T, 2>*)(origin + at.row * stride + at.column));
  return values;
}

template <typename T>
METAL_FUNC void store_even_fragment(device T* origin, int64_t stride, int rows, LanePosition at, float2 values) {
  if (at.row < rows) *(device vec<T, 2>*)(origin + at.row * stride + at.column) = vec<T, 2>(values);
}

template <typename T>
METAL_FUNC void store_even_fragment(threadgroup T* origin, int stride, LanePosition at, float2 values) {
  *(threadgroup vec<T, 2>*)(origin + at.row * stride + at.column) = vec<T, 2>(values);
}
