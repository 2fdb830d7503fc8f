#pragma once
#include "core/parameters.h"

struct LocateSlotsParameters {
  SlotParameters slots;
  int32_t indices;
  OpName op;
};
