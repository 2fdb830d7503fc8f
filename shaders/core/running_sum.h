// Computes a running sum over lanes, in the order of the lanes. The exponent of a decay is the difference of two such
// sums. The difference keeps most digits if the later sum continues from the earlier one. simd_prefix_inclusive_sum
// adds in the device's own order; the order of a tree triples the error.
#pragma once
#include "core/fragment.h"

// Sums lanes 0 to `Lanes` - 1, starting from `carried`. Every lane of the simdgroup must call this.
template <int Lanes>
METAL_FUNC float running_sum(float carried, float x, uint lane) {
  float sum = carried;
  UNROLL for (int from = 0; from < Lanes; ++from) {
    const float other = simd_shuffle(x, ushort(from));
    sum += from <= int(lane) ? other : 0.0f;
  }
  return sum;
}
