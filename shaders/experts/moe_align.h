#pragma once
#include "experts/parameters.h"

GDN_CONSTANT int kTilePairs = 32;  // of one expert, in a tile

// Pairs first .. first + rows of the sorted ones, which have one expert; 0 rows: a surplus tile. Expert E: left out.
struct PairTile {
  int32_t expert, first, rows;
};

// Tiles of all pairs, at most: expert e has tiles from (pairs with a lower expert) / kTilePairs + e on.
inline constexpr int64_t most_tiles(int64_t pairs, int64_t experts) { return pairs / kTilePairs + experts + 1; }
