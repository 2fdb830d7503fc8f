// What host and kernel share of locate_slots.metal.
#pragma once
#include "core/parameters.h"

struct LocateSlotsParameters {
  SlotParameters slots;
  int32_t sequences;
};
