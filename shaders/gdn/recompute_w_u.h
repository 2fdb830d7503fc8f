#pragma once
#include "core/parameters.h"

struct RecomputeWUParameters {
  SequenceParameters sequence;
  RowStrides k, v;
  HeadGroups heads;
  int32_t value_heads;
};
