#pragma once
#include "core/parameters.h"

struct GdnGatingParameters {
  GateParameters gates;
  int32_t count, tokens, heads;  // `count` values of [B, T, HV]
};
