#pragma once
#include "experts/parameters.h"

// Tiles of all pairs, at most: expert e has tiles from (pairs with a lower expert) / kTilePairs + e on.
inline constexpr int64_t most_tiles(int64_t pairs, int64_t experts) { return pairs / kTilePairs + experts + 1; }
