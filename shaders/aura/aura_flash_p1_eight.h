// Geometry of pass 1 for 8 query rows. Its parameters are FlashParameters.
#pragma once
#include "aura/parameters.h"

GDN_CONSTANT int kEightRows = 8;       // query rows per threadgroup
GDN_CONSTANT int kEightKeys = 32;      // keys per tile; a simdgroup owns a tile
GDN_CONSTANT int kEightColumns = 256;  // most columns of o per threadgroup
