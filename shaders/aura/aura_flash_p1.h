// Geometry of pass 1 for few query rows; its parameters are FlashParameters.
#pragma once
#include "aura/parameters.h"

GDN_CONSTANT int kFlashKeys = kAuraThreads;  // of which a block is a multiple

// Returns the most query rows of a threadgroup: q and o take D / 4 to D / 2 registers of a simdgroup for each row.
inline constexpr int flash_most_rows(int D) { return D <= 256 ? 4 : 2; }
