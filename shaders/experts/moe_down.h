#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kDownSimdgroups = 12;
GDN_CONSTANT int kDownLanes = 8;  // that share the columns of a row

// The rows of every expert that a threadgroup owns. Each threadgroup reads the vectors anew: they are 1 in 32 bytes if
// the weights are numbers. Codes take more registers a row, so a lane has fewer rows of them.
template <int Bits>
struct DownPlan {
  GDN_CONSTANT int kRowsOfLane = Bits == 0 ? 8 : 4;
  GDN_CONSTANT int kRows = 32 / kDownLanes * kRowsOfLane;
};
