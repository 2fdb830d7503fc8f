// Geometry of pass 1 in 8x8 blocks. Its parameters are FlashParameters.
#pragma once
#include "aura/parameters.h"

GDN_CONSTANT int kMatrixRows = 32;      // query rows per threadgroup: 8 for each simdgroup
GDN_CONSTANT int kMatrixKeys = 32;      // keys per tile
GDN_CONSTANT int kMatrixColumns = 256;  // most columns of o per threadgroup
GDN_CONSTANT int kMatrixSlice = 128;    // most columns of keys or values that are dequantised at once
