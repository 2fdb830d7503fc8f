#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kNormBwdLargestRow = 12288;

// A thread owns 16 elements of a row. From D of 6144 on it owns up to 32, because 128 registers leave room for 384
// threads.
inline constexpr int norm_bwd_threads(int D) { return D >= 6144 ? 384 : (D + 511) / 512 * 32; }

struct NormBwdParameters {
  int32_t rows, tokens, heads;  // the rows are [B, T, H]
  RowStrides x, dy, gate, dh;
  float eps, count;  // rstd is rsqrt(sum of x^2 / count + eps)
  int32_t rows_of_group;
  int32_t has_weight, has_gate, has_sigmoid, has_dh, has_dweight;
  int32_t zero_centered;  // if 1, the factor is 1 + weight
};
