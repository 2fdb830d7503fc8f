#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kDownSimdgroups = 12;
GDN_CONSTANT int kDownLanes = 8;       // that share the columns of a row
GDN_CONSTANT int kDownRowsOfLane = 4;  // of each expert; so many rows share what a lane reads of a vector
GDN_CONSTANT int kDownRows = 32 / kDownLanes * kDownRowsOfLane;  // per threadgroup
