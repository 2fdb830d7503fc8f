// What host and kernel share of solve_tril.metal.
#pragma once
#include "core/parameters.h"

struct SolveTrilParameters {
  SequenceParameters sequence;
  int32_t value_heads;
};
