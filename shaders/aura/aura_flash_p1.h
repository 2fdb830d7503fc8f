// Geometry of pass 1, a key at a time; its parameters are FlashParameters.
#pragma once
#include "aura/parameters.h"

GDN_CONSTANT int kFlashKeys = kAuraThreads;  // of a tile: one a thread
GDN_CONSTANT int kFlashMostRows = 8;         // of a threadgroup: 1, 2, 4 or 8
