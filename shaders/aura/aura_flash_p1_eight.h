// Geometry of pass 1 for 8 query rows; its parameters are FlashParameters.
#pragma once
#include "aura/parameters.h"

GDN_CONSTANT int kEightRows = 8;       // of a threadgroup
GDN_CONSTANT int kEightKeys = 32;      // of a simdgroup's tile
GDN_CONSTANT int kEightColumns = 256;  // of o for a threadgroup, at most
