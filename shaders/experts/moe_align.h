#pragma once
#include "experts/parameters.h"

GDN_CONSTANT int kTilePairs = 32;  // per tile, all of one expert

// A tile has sorted pairs first .. first + rows, all of one expert. A surplus tile has 0 rows. Expert E stands for
// skipped pairs.
struct PairTile {
  int32_t expert, first, rows;
};

// Returns the maximum number of tiles for all pairs. The tiles of expert e start at (pairs with a lower expert) /
// kTilePairs + e.
inline constexpr int64_t most_tiles(int64_t pairs, int64_t experts) { return pairs / kTilePairs + experts + 1; }
