#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kL2NormRows = 4;           // of a threadgroup, one a simdgroup
GDN_CONSTANT int kL2NormLargestRow = 1024;  // a lane holds 32 elements in registers

struct L2NormParameters {
  int32_t rows, tokens, heads;  // the rows are [B, T, H]
  RowStrides x;
  float eps;
};
