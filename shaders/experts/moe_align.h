#pragma once
#include "experts/parameters.h"

GDN_CONSTANT int kTilePairs = 32;  // of one expert, per tile

// A tile has pairs first .. first + rows of the sorted ones, all of one expert. A surplus tile has 0 rows. Expert E
// stands for skipped pairs.
struct PairTile {
  int32_t expert, first, rows;
};

// The maximum number of tiles for all pairs. Expert e has tiles from (pairs with a lower expert) / kTilePairs + e on.
inline constexpr int64_t most_tiles(int64_t pairs, int64_t experts) { return pairs / kTilePairs + experts + 1; }
