// Attention of a threadgroup's query rows to the keys that any of them sees. Threadgroup memory holds one tile of keys
// at a time. Either each simdgroup has 8 rows of its own and all keys of a tile; or kSharing simdgroups have the same 8
// rows, each takes a part of a tile's keys, and they are merged after the last tile. `Pages` hides what the pages hold.
// It finds a key's place and stages tiles:
//   locate(place, sequence, position, kv_head, key)   called by the thread of a key of the tile
//   report(sequence)   called by one thread, for errors that only the device can see
//   stage_keys(tile, thread), stage_values(tile, thread)   called by all threads
#pragma once
#include "attention/output.h"
#include "attention/paged_attention.h"
#include "core/tile.h"

// Returns the number of keys in a tile with elements of E, which takes up to 17 KB.
template <typename E, int D>
METAL_FUNC constexpr int keys_of_tile() {
  return D * int(sizeof(E)) > 512 ? 16 : 32;
}

template <typename E, int D>
METAL_FUNC constexpr int size_of_tile() {
  return keys_of_tile<E, D>() * tile_stride<E>(D);
}

// Returns the number of float2 that simdgroups with the same rows exchange.
template <int D, int kSharing>
METAL_FUNC constexpr int size_of_exchange() {
  return kSharing > 1 ? D * 4 + kSharing * 8 : 1;
}

template <typename E, int D, int kSharing, typename T, typename Pages>
METAL_FUNC void attend(
    device const T* q,
    device const int* block_table,
    Requests requests,
    Output<T> output,
    device ErrorLog* errors,
    constant PagedParameters& parameters,
    thread const Pages& pages,
    threadgroup E* tile_of_keys,
    threadgroup float2* exchange,
    uint3 group,
    uint thread_index,
    uint lane,
    uint simdgroup) {
  static_assert(D % 16 == 0 && D <= 256, "a vector is whole pairs of fragments");
  constexpr int kKeys = keys_of_tile<E, D>();
  constexpr int kBlocks = kKeys / 8 / kSharing;
  static_assert(kKeys % (8 * kSharing) == 0, "a part of a tile is whole fragments");
  static_assert(kKeys <= 32, "each key of a tile has a thread, of one simdgroup at least");
  const int kv_head = int(group.y);
  const int split = int(group.z);
  if (int(group.x) < parameters.sequences && split == 0 && kv_head == 0 && thread_index == 0) {
    const int index = int(group.x);
    report_sequence(requests, parameters, index, errors);
    const int64_t first = read_boundary(requests, parameters, index);
    if (first != read_boundary(requests, parameters, index + 1)) pages.report(index);
  }
  const RowTile tile = locate_tile(requests, parameters, int(group.x), lane);
  if (tile.rows == 0) return;
  KeyRange range = seen_by_tile(parameters, tile);
  const int splits = splits_of(parameters, tile, range);
  if (split >= splits) return;
  range = range_of_split(parameters, range, splits, split);

  const LanePosition at = lane_position(lane);
  const int own_row = (kSharing > 1 ? 0 : int(simdgroup) * kPrefillRows) + at.column;
  const int own_key = kSharing > 1 ? int(simdgroup) * kBlocks * 8 : 0;  // first key of the tile for this simdgroup
  TileQuery<T, D, kSharing, (kSharing > 1)> query;
  query.load(query_rows(q, parameters, tile, kv_head, own_row, at.row), exchange, simdgroup, lane);
  const SeenKeys seen = seen_by_lane(parameters, tile, own_row);
  const StagedRows<E, tile_stride<E>(D)> staged{tile_of_keys + own_key * tile_stride<E>(D)};
  RowState state = no_keys();
  float2 o[D / 8];
  UNROLL for (int part = 0; part < D / 8; ++part) o[part] = float2(0.0f);
  for (int first = range.first; first < range.last; first += kKeys) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (int(thread_index) < kKeys) {
      const int key = min(first + int(thread_index), range.last - 1);
      const KeyPlace place = key_place(block_table, parameters, tile.sequence.index, key, errors);
      pages.locate(place, tile.sequence, key, kv_head, int(thread_index));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    pages.stage_keys(tile_of_keys, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float2 scores[kBlocks];
    multiply_keys<D, kBlocks>(scores, staged, query, at);
    const ScaledKeys scaled{parameters.scale};
    const float2 rescale = online_softmax<kBlocks>(scores, state, scaled, first + own_key + at.row, seen);
    UNROLL for (int part = 0; part < D / 8; ++part) o[part] *= rescale;

    threadgroup_barrier(mem_flags::mem_threadgroup);
    pages.stage_values(tile_of_keys, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply_values<D, kBlocks>(o, scores, staged, at);
  }
  if constexpr (kSharing > 1) {
    merge_simdgroups<D, kSharing, D * 4>(o, state, exchange, at, simdgroup, lane);
    if (simdgroup > 0) return;
  }
  store_rows<D>(o, state, output, parameters, tile, kv_head, own_row, splits, split, at.row);
}
