#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kRmsNormLargestRow = 16384;

// A row has one threadgroup, and a thread 16 of its elements, or more if it has 256 threads.
inline constexpr int rms_norm_threads(int D) { return D >= 4096 ? 256 : (D + 511) / 512 * 32; }

struct RmsNormParameters {
  int32_t rows, tokens, heads;  // the rows are [B, T, H]
  RowStrides x, residual;
  float eps;
  int32_t has_weight, has_residual;
  int32_t zero_centered;  // 1 + weight
  int32_t round_norm;     // 1 to round to x's type before multiplying by the weight
};
