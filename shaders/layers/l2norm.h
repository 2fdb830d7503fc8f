#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kL2NormRows = 4;      // per threadgroup, one per simdgroup
GDN_CONSTANT int kL2NormBlock = 1024;  // elements in the registers of a simdgroup, 32 per lane

struct L2NormParameters {
  int32_t rows, tokens, heads;  // the rows are [B, T, H]
  int32_t has_rstd;
  RowStrides x;
  int64_t D;  // elements per row
  float eps;
};
