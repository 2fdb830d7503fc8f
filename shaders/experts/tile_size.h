#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kTileColumns = 32;  // rows of each of the two matrices that a threadgroup multiplies
GDN_CONSTANT int kTileThreads = 128;
GDN_CONSTANT int kTileDepth = 32;  // columns in threadgroup memory at a time
