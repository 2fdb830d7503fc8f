#pragma once
#include "experts/few_rows.h"

// The work of a threadgroup of quantized_linear for up to `Most` rows of x. A simdgroup multiplies 2 * kRowsOfHalf rows
// of W, and kParts simdgroups share the columns of the same rows.
template <int Most>
struct LinearPlan {
  GDN_CONSTANT int kParts = Most <= 2 ? 2 : 1;
  GDN_CONSTANT int kSimdgroups = 8;
  GDN_CONSTANT int kRows = kSimdgroups / kParts * 2 * kRowsOfHalf;  // of W, per threadgroup
};
