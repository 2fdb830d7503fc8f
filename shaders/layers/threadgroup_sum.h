#pragma once
#include <metal_stdlib>

#include "core/fragment.h"
using namespace metal;

// Returns the sum over the threads of a threadgroup. Before the next call with the same `sums`, a barrier must follow.
template <int Threads>
METAL_FUNC float threadgroup_sum(float value, threadgroup float* sums, uint lane, uint simdgroup) {
  const float sum = simd_sum(value);
  if constexpr (Threads == 32) return sum;
  if (lane == 0) sums[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total = 0.0f;
  UNROLL for (int i = 0; i < Threads / 32; ++i) total += sums[i];
  return total;
}
