#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kActAndMulMostThreads = 256;  // per threadgroup

struct ActAndMulParameters {
  int32_t rows, tokens, heads;  // the rows are [B, T, H]
  int32_t D;                    // per row
  RowStrides x, up;             // x is the tensor of the gate
  int32_t threads;              // per threadgroup
  int32_t has_sigmoid;          // if 0, the gate is silu
};
