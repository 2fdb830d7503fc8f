#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kQkNormRopeRows = 4;  // heads per threadgroup, one per simdgroup

struct QkNormRopeParameters {
  int32_t rows, tokens, heads;  // [B, T, HQ + HK]
  int32_t q_heads;              // HQ
  int32_t D, pairs;             // elements per head; pairs to rotate
  RowStrides x, k;              // x is q
  RowStrides q_out, k_out;
  RowStrides cos, sin;  // [B, T, 1, P]
  float eps;
  int32_t has_norm, zero_centered;  // 1 + weight
};
