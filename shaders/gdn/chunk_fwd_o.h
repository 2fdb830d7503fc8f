#pragma once
#include "core/parameters.h"

struct ChunkFwdOParameters {
  SequenceParameters sequence;
  SlotParameters slots;
  RowStrides q, k, o;
  StateStrides h;
  HeadGroups heads;
  int32_t value_heads;
  int32_t output_is_f32;  // if 1, o is f32, else T
  float scale;
};
