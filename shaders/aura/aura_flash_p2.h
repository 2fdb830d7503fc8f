#pragma once
#include "aura/parameters.h"

struct MergeParameters {
  VectorParameters vectors;      // [B, HQ, L]
  int32_t blocks, exact_blocks;  // all, and those of exact rows, which are the last
  int32_t has_sinks;
  int32_t together;  // simdgroups that share their rows: 1 or 4
};
