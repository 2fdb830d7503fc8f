// A running sum over lanes, one after another. A decay's exponent is a difference of two of its sums, which keeps most
// digits if the later one goes on from the earlier one; simd_prefix_inclusive_sum's order is the device's own, and
// that of a tree costs three times the error.
#pragma once
#include "core/fragment.h"

// Of lanes 0 to `Lanes` - 1, on top of `carried`. Every lane of the simdgroup must call.
template <int Lanes>
METAL_FUNC float running_sum(float carried, float x, uint lane) {
  float sum = carried;
  UNROLL for (int from = 0; from < Lanes; ++from) {
    const float other = simd_shuffle(x, ushort(from));
    sum += from <= int(lane) ? other : 0.0f;
  }
  return sum;
}
