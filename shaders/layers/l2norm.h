#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kL2NormRows = 4;      // of a threadgroup, one a simdgroup
GDN_CONSTANT int kL2NormBlock = 1024;  // elements that a simdgroup holds in registers, 32 per lane

struct L2NormParameters {
  int32_t rows, tokens, heads;  // the rows are [B, T, H]
  int32_t has_rstd;
  RowStrides x;
  int64_t D;  // elements of a row
  float eps;
};
