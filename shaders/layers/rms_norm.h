#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kRmsNormLargestRow = 16384;

// Each row has one threadgroup. A thread owns 16 elements of the row, or more if there are 256 threads.
inline constexpr int rms_norm_threads(int D) { return D >= 4096 ? 256 : (D + 511) / 512 * 32; }

struct RmsNormParameters {
  int32_t rows, tokens, heads;  // the rows are [B, T, H]
  RowStrides x, residual;
  float eps;
  int32_t has_weight, has_residual;
  int32_t zero_centered;  // if 1, the factor is 1 + weight
  int32_t round_norm;     // if 1, rounds to x's type before the product with the weight
};
