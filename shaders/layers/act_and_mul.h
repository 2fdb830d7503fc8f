#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kActAndMulMostThreads = 256;  // of a threadgroup

struct ActAndMulParameters {
  int32_t rows, tokens, heads;  // the rows are [B, T, H]
  int32_t D;                    // of a row
  RowStrides x, up;             // x: the gate
  int32_t threads;              // of a threadgroup
  int32_t has_sigmoid;          // else silu
};
