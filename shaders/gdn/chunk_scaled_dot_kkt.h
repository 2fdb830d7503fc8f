#pragma once
#include "core/parameters.h"

struct ChunkScaledDotKktParameters {
  SequenceParameters sequence;
  RowStrides k;
  HeadGroups heads;
  int32_t value_heads;
};
