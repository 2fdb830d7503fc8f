#pragma once
#include "experts/few_rows.h"

// The rows of gate, and of up, that a threadgroup owns. It reads the vectors anew, so numbers need more rows than codes
// to keep this small. Two small threadgroups wait less than one large one.
template <int Bits>
struct GateUpPlan {
  GDN_CONSTANT int kSimdgroups = Bits == 0 ? 16 : 8;
  GDN_CONSTANT int kRows = kSimdgroups * kRowsOfHalf;
};
