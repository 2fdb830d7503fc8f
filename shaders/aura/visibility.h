// Finds the keys that a query row sees, and where the row's vectors lie.
#pragma once
#include <metal_stdlib>

#include "aura/parameters.h"
#include "aura/rotation.h"
using namespace metal;

struct KeyRange {
  int first, last;  // keys [first, last)
};

// Returns the keys of a block.
METAL_FUNC KeyRange block_range(constant FlashParameters& parameters, int block) {
  KeyRange range;
  range.first = int(min(int64_t(block) * parameters.block_size, int64_t(parameters.keys)));
  range.last = min(parameters.keys, range.first + parameters.block_size);
  return range;
}

// Returns the first position of a batch row that is not padding, clamped to [0, 2^30]. `starts` holds 32-bit words, the
// low word of an element first.
METAL_FUNC int start_of(device const int* starts, int words, int batch) {
  constexpr int kMost = 1 << 30;
  device const int* start = starts + int64_t(batch) * words;
  if (words == 2 && start[1] < 0) return 0;
  if (words == 2 && (start[1] > 0 || start[0] < 0)) return kMost;
  return clamp(start[0], 0, kMost);
}

// Returns the keys of `range` that a row sees. The cache's first key has position `first_position`.
METAL_FUNC KeyRange
visible_range(constant FlashParameters& parameters, device const int* starts, int batch, int row, KeyRange range) {
  const int position = parameters.q_offset + row / parameters.ratio - parameters.first_position;
  if (parameters.start_words != 0) {
    range.first = max(range.first, start_of(starts, parameters.start_words, batch) - parameters.first_position);
  }
  if (parameters.window > 0) range.first = max(range.first, position - parameters.window + 1);
  if (parameters.causal != 0) range.last = min(range.last, position + 1);
  return range;
}

// Holds a row's query head, its query, and its index in [B, HQ, L].
struct RowPlace {
  int64_t head;
  int query;
  int64_t index;
};

template <typename Parameters>
METAL_FUNC RowPlace row_place(constant Parameters& parameters, int batch, int kv_head, int row) {
  RowPlace place;
  place.head = int64_t(kv_head) * parameters.ratio + row % parameters.ratio;
  place.query = row / parameters.ratio;
  place.index =
      (int64_t(batch) * parameters.kv_heads * parameters.ratio + place.head) * parameters.queries + place.query;
  return place;
}

// Returns the keys that any of rows first_row .. last_row sees. Later queries see later keys. The range begins at a
// multiple of kTogether, so that kTogether keys belong to one tile; no row may see its first keys.
template <int kTogether>
METAL_FUNC KeyRange range_of_rows(
    constant FlashParameters& parameters,
    device const int* starts,
    int batch,
    int first_row,
    int last_row,
    KeyRange range) {
  static_assert(kTokensOfTile % kTogether == 0, "a tile is whole groups of keys");
  KeyRange result;
  result.first = visible_range(parameters, starts, batch, first_row, range).first;
  result.first -= result.first % kTogether;
  result.last = visible_range(parameters, starts, batch, last_row, range).last;
  return result;
}

// Reads the products of a query row with the means that were subtracted from tiles of keys.
struct TileScores {
  device const float* row;
  bool present;

  METAL_FUNC float at(int key) const { return present ? row[uint(key) / uint(kTokensOfTile)] : 0.0f; }
};

METAL_FUNC TileScores
tile_scores_of(device const float* tile_scores, constant FlashParameters& parameters, RowPlace place) {
  TileScores scores;
  scores.row = tile_scores + place.index * parameters.tiles;
  scores.present = parameters.tiles != 0;
  return scores;
}

// A row's state between tiles: the largest score, and the sum of exp(score - largest).
struct RowSums {
  float m, l;
};

METAL_FUNC RowSums no_sums() {
  RowSums sums;
  sums.m = -INFINITY;
  sums.l = 0.0f;
  return sums;
}
