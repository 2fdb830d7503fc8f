// What the kernels that rotate heads share with the host.
#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kRotatedRows = 4;  // heads per threadgroup, one per simdgroup

struct Rotation {
  RowStrides cos, sin;  // [B, T, 1, P]
  int32_t D, pairs;     // elements per head; pairs to rotate
  float eps;
  int32_t has_norm, zero_centered;  // 1 + weight
};
