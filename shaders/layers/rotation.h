// The kernels that rotate heads share these definitions with the host.
#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kRotatedRows = 4;  // heads per threadgroup, one per simdgroup

struct Rotation {
  RowStrides cos, sin;  // [B, T, 1, P]
  int32_t D, pairs;     // elements of a head; pairs to rotate
  float eps;
  int32_t has_norm, zero_centered;  // if 1, there is a norm; if 1, its factor is 1 + weight
};
