#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kDownSimdgroups = 12;
GDN_CONSTANT int kDownLanes = 8;  // lanes that share the columns of a row

// The number of rows of every expert that a threadgroup owns. Each threadgroup reads the vectors again. If weights are
// numbers, the vectors are 1 of 32 bytes read. Codes take more registers per row, so a lane has fewer rows of codes.
template <int Bits>
struct DownPlan {
  GDN_CONSTANT int kRowsOfLane = Bits == 0 ? 8 : 4;
  GDN_CONSTANT int kRows = 32 / kDownLanes * kRowsOfLane;
};
