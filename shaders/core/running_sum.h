// A running sum over lanes, added one after another. A decay's exponent is the difference of two of its sums. The
// difference keeps most digits if the later sum continues from the earlier one. simd_prefix_inclusive_sum has the
// device's own order; a tree's order triples the error.
#pragma once
#include "core/fragment.h"

// Sums lanes 0 to `Lanes` - 1, on top of `carried`. Every lane of the simdgroup must call.
template <int Lanes>
METAL_FUNC float running_sum(float carried, float x, uint lane) {
  float sum = carried;
  UNROLL for (int from = 0; from < Lanes; ++from) {
    const float other = simd_shuffle(x, ushort(from));
    sum += from <= int(lane) ? other : 0.0f;
  }
  return sum;
}
