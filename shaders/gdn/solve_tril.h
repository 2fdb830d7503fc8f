#pragma once
#include "core/parameters.h"

struct SolveTrilParameters {
  SequenceParameters sequence;
  int32_t value_heads;
};
