#pragma once
#include "aura/parameters.h"

struct MergeParameters {
  VectorParameters vectors;      // [B, HQ, L]
  int32_t blocks, exact_blocks;  // number of all blocks, and of the last ones, which belong to exact rows
  int32_t has_sinks;
  int32_t together;  // number of simdgroups that share their rows: 1 or 4
};
