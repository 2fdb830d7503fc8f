#pragma once
#include "core/parameters.h"

// The number of heads that a threadgroup owns, one per lane.
GDN_CONSTANT int kCumsumHeads = 32;

struct ChunkLocalCumsumParameters {
  SequenceParameters sequence;
  RowStrides g;
  int32_t g_type;
  int32_t value_heads;
};
