// Geometry of pass 1 for few query rows. Its parameters are FlashParameters.
#pragma once
#include "aura/parameters.h"

GDN_CONSTANT int kFlashKeys = kAuraThreads;  // the default block size is a multiple of this

// Returns the most query rows per threadgroup. For each row, a lane holds 8 columns of q and of o (16 if D is 512),
// which takes 16 or 32 registers.
inline constexpr int flash_most_rows(int D) { return D <= 256 ? 4 : 2; }
