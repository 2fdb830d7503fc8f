#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kRmsNormGatedRows = 4;           // per threadgroup, one per simdgroup
GDN_CONSTANT int kRmsNormGatedLargestRow = 1024;  // a lane holds 32 elements in registers

struct RmsNormGatedParameters {
  int32_t rows, tokens, heads;  // the rows are [B, T, H]
  RowStrides x, gate;
  float eps;
  int32_t has_weight, has_sigmoid;    // if has_sigmoid is 0, the gate is silu
  int32_t round_norm, round_product;  // 1 to round to x's type before and after the product with the weight
};
