// Geometry of pass 1 in 8x8 blocks; its parameters are FlashParameters.
#pragma once
#include "aura/parameters.h"

GDN_CONSTANT int kMatrixRows = 32;      // of a threadgroup: 8 for each simdgroup
GDN_CONSTANT int kMatrixKeys = 32;      // of a tile
GDN_CONSTANT int kMatrixColumns = 256;  // of o for a threadgroup, at most
GDN_CONSTANT int kMatrixSlice = 128;    // columns of keys or values dequantised at once, at most
