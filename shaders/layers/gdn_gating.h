#pragma once
#include "core/parameters.h"

struct GdnGatingParameters {
  GateParameters gates;
  int32_t tokens, heads;
  int64_t count;  // of values in g
};
