// Geometry of pass 1 for few query rows; its parameters are FlashParameters.
#pragma once
#include "aura/parameters.h"

GDN_CONSTANT int kFlashKeys = kAuraThreads;  // a default block is a multiple of these

// Returns the most query rows of a threadgroup. A lane holds q and o of 8 columns, or 16 of 512: 16 or 32 registers for
// each row.
inline constexpr int flash_most_rows(int D) { return D <= 256 ? 4 : 2; }
