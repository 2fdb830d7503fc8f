#pragma once
#include "core/parameters.h"

struct ChunkFwdIntraParameters {
  SequenceParameters sequence;
  GateParameters gates;
  RowStrides k, v;
  HeadGroups heads;
  int32_t value_heads;
  int32_t members;  // value heads of one key head that a threadgroup owns
};
