#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kQkNormRopeRows = 4;  // heads of a threadgroup, one a simdgroup

struct QkNormRopeParameters {
  int32_t rows, tokens, heads;  // [B, T, HQ + HK]
  int32_t q_heads;              // HQ
  int32_t D, pairs;             // elements of a head; pairs that are rotated
  RowStrides x, k;              // x: q
  RowStrides q_out, k_out;
  RowStrides cos, sin;  // [B, T, 1, P]
  float eps;
  int32_t has_norm, zero_centered;  // 1 + weight
};
