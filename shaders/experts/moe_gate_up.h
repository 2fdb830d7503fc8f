#pragma once
#include "experts/few_rows.h"

// The number of rows of gate, and of up, that a threadgroup owns. Each threadgroup reads the vectors again. Numbers
// need more rows than codes to keep these reads small. Two small threadgroups wait less than one large one.
template <int Bits>
struct GateUpPlan {
  GDN_CONSTANT int kSimdgroups = Bits == 0 ? 16 : 8;
  GDN_CONSTANT int kRows = kSimdgroups * kRowsOfHalf;
};
