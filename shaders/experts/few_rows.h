#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kRowsOfHalf = 4;  // of each of the two matrices that a simdgroup multiplies
