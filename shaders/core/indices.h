// Reads index tensors of dtype int32 or int64, and makes boundaries ascend.
#pragma once
#include "core/fragment.h"

// `bytes` is the size of one index, 4 or 8.
METAL_FUNC int64_t read_index(device const int* indices, int64_t at, int bytes) {
  if (bytes == 4) return indices[at];
  return ((device const int64_t*)indices)[at];
}

// Returns the largest value of this lane and the lanes before it. Every lane of the simdgroup must call.
METAL_FUNC int largest_so_far(int value, uint lane) {
  UNROLL for (ushort distance = 1; distance < 32; distance *= 2) {
    const int earlier = simd_shuffle_up(value, distance);
    if (ushort(lane) >= distance) value = max(value, earlier);
  }
  return value;
}
