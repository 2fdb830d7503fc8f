// What the kernels of pass 1 share. It finds the keys that a query row sees, and where the row's vectors lie. For
// products of fragments (core/row_attention.h), it stages 8 query rows, and stores their partials.
#pragma once
#include <metal_stdlib>

#include "aura/code_sizes.h"
#include "aura/parameters.h"
#include "aura/rotation.h"
#include "core/row_attention.h"
using namespace metal;

struct KeyRange {
  int first, last;  // keys [first, last)
};

METAL_FUNC constexpr int smaller(int a, int b) { return a < b ? a : b; }

// What a threadgroup of pass 1 owns: query rows first_row .. last_row of a KV head, a block of keys, and columns of o.
struct FlashTile {
  int batch, kv_head, first_row, last_row, block, first_column;
};

template <int kRows, int D, int kColumns, typename Parameters>
METAL_FUNC FlashTile flash_tile(constant Parameters& parameters, uint3 group) {
  const int row_tiles = (parameters.rows + kRows - 1) / kRows;
  const int first_row = int(group.y) % row_tiles * kRows;
  const int last_row = min(first_row + kRows, parameters.rows) - 1;
  const int column_groups = D / kColumns;
  return {int(group.z), int(group.y) / row_tiles,     first_row,
          last_row,     int(group.x) / column_groups, int(group.x) % column_groups * kColumns};
}

// Returns the keys of a block.
METAL_FUNC KeyRange block_range(constant FlashParameters& parameters, int block) {
  const int first = int(min(int64_t(block) * parameters.block_size, int64_t(parameters.keys)));
  return {first, min(parameters.keys, first + parameters.block_size)};
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
METAL_FUNC RowPlace row_place(constant Parameters& parameters, FlashTile tile, int row) {
  const int64_t head = int64_t(tile.kv_head) * parameters.ratio + row % parameters.ratio;
  const int query = row / parameters.ratio;
  const int64_t first_head = int64_t(tile.batch) * parameters.kv_heads * parameters.ratio;
  return {head, query, (first_head + head) * parameters.queries + query};
}

// Returns the keys that any of the threadgroup's rows sees. Later queries see later keys. The range begins at a
// multiple of kTogether, so that kTogether keys have the same means; no row may see its first keys.
template <int kTogether>
METAL_FUNC KeyRange
range_of_rows(constant FlashParameters& parameters, device const int* starts, FlashTile tile, KeyRange range) {
  static_assert(kTokensOfTile % kTogether == 0, "a tile is whole groups of keys");
  const int first = visible_range(parameters, starts, tile.batch, tile.first_row, range).first;
  return {first - first % kTogether, visible_range(parameters, starts, tile.batch, tile.last_row, range).last};
}

// Reads the products of a query row with the means that were subtracted from tiles of keys.
struct TileScores {
  device const float* row;
  bool present;

  METAL_FUNC float at(int key) const { return present ? row[uint(key) / uint(kTokensOfTile)] : 0.0f; }
};

METAL_FUNC TileScores
tile_scores_of(device const float* tile_scores, constant FlashParameters& parameters, RowPlace place) {
  return {tile_scores + place.index * parameters.tiles, parameters.tiles != 0};
}

// A row's state between tiles: the largest score, and the sum of exp(score - largest).
struct RowSums {
  float m, l;
};

METAL_FUNC RowSums no_sums() { return {-INFINITY, 0.0f}; }

// Stages q for StagedQuery if a lane loads kWidth neighbouring columns of a key.
template <typename T, int D, int kWidth, typename Parameters>
METAL_FUNC void stage_queries(
    threadgroup float2* staged, device const T* q, constant Parameters& parameters, FlashTile tile, uint thread_index) {
  for (int item = int(thread_index); item < D * 4; item += kAuraThreads) {
    const LanePosition at = lane_position(uint(item % 32));
    const int part = item / 32;
    const int column = column_of_query<D, kWidth>(part, at.row);
    float2 both;
    UNROLL for (int i = 0; i < 2; ++i) {
      const int row = min(tile.first_row + at.column + i, parameters.rows - 1);
      const RowPlace place = row_place(parameters, tile, row);
      both[i] = float(q[offset_of(parameters.q, tile.batch, place.head, place.query) + column]);
    }
    staged[item] = both;
  }
}

// Stores the threadgroup's rows, of which a lane holds two from `own_row` on. kWidth is that of the values.
template <int D, int kColumns, int kWidth, typename Parameters>
METAL_FUNC void store_partials(
    Partials partials,
    thread const float2* o,
    RowState state,
    constant Parameters& parameters,
    FlashTile tile,
    int block,
    LanePosition at) {
  UNROLL for (int i = 0; i < 2; ++i) {
    const int row = tile.first_row + at.column + i;
    if (row <= tile.last_row) {
      const int64_t target = row_place(parameters, tile, row).index * parameters.blocks + block;
      store_row<kColumns, kWidth>(partials.o + target * D + tile.first_column, o, i, 1.0f, at.row);
      if (tile.first_column == 0 && at.row == 0) {
        partials.m[target] = state.m[i];
        partials.l[target] = state.l[i];
      }
    }
  }
}
