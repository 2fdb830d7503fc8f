#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kTileColumns = 32;  // rows of each of a threadgroup's two matrices
GDN_CONSTANT int kTileThreads = 128;
GDN_CONSTANT int kTileDepth = 32;  // columns in threadgroup memory at a time
