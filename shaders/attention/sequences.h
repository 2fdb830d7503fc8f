// Finds the queries, keys and pages of a sequence in tensors on the device. Wrong numbers are reported and clamped, so
// that no access leaves a tensor.
#pragma once
#include "attention/paged_attention.h"
#include "core/error.h"
#include "core/fragment.h"
#include "core/indices.h"

struct PagedSequence {
  int index;
  int first, queries;  // first row of q, and number of queries
  int keys;
};

// The boundaries of the sequences' queries, and the numbers of their keys.
struct Requests {
  device const int* cu_seqlens;
  device const int* seq_lens;
};

METAL_FUNC int64_t read_boundary(Requests from, constant PagedParameters& parameters, int index) {
  return read_index(from.cu_seqlens, index * parameters.boundary, parameters.boundary_bytes);
}

METAL_FUNC int query_boundary(Requests from, constant PagedParameters& parameters, int index) {
  return int(clamp(read_boundary(from, parameters, index), int64_t(0), int64_t(parameters.tokens)));
}

METAL_FUNC int64_t read_length(Requests from, constant PagedParameters& parameters, int index) {
  return read_index(from.seq_lens, index * parameters.length, parameters.length_bytes);
}

METAL_FUNC int capacity_of(constant PagedParameters& parameters) {
  return int(min(int64_t(parameters.table_blocks) * parameters.block_size, int64_t(1) << 30));
}

METAL_FUNC int rows_of(constant PagedParameters& parameters, int queries) {
  return int(min(int64_t(queries) * parameters.ratio, int64_t(parameters.query_rows)));
}

METAL_FUNC int keys_of_sequence(Requests from, constant PagedParameters& parameters, int index) {
  return int(clamp(read_length(from, parameters, index), int64_t(0), int64_t(capacity_of(parameters))));
}

// Makes boundaries ascending, so that no row of q belongs to two sequences. Every lane of the simdgroup must call this.
METAL_FUNC PagedSequence paged_sequence(Requests from, constant PagedParameters& parameters, int index, uint lane) {
  int highest = 0;
  for (int i = int(lane); i <= index; i += 32) highest = max(highest, query_boundary(from, parameters, i));
  const int first = simd_max(highest);
  const int queries = max(0, query_boundary(from, parameters, index + 1) - first);
  return {index, first, queries, keys_of_sequence(from, parameters, index)};
}

// A tile of rows of one KV head.
struct RowTile {
  PagedSequence sequence;
  int first_row, rows;  // rows is 0 for a surplus tile
};

// Finds tile `target` among the tiles of all sequences. Every lane of the simdgroup must call this.
METAL_FUNC RowTile locate_tile(Requests from, constant PagedParameters& parameters, int target, uint lane) {
  RowTile tile{{0, 0, 0, 0}, 0, 0};
  int carried_boundary = query_boundary(from, parameters, 0);
  int carried_tiles = 0;
  for (int base = 0; base < parameters.sequences; base += 32) {
    const int index = base + int(lane);
    const int own = index < parameters.sequences ? query_boundary(from, parameters, index + 1) : 0;
    const int last = largest_so_far(max(own, carried_boundary), lane);
    const int previous = simd_shuffle_up(last, ushort(1));
    const int first = lane == 0 ? carried_boundary : previous;
    const int rows = rows_of(parameters, last - first);
    const int tiles = (rows + parameters.rows - 1) / parameters.rows;
    const int tiles_before = carried_tiles + simd_prefix_exclusive_sum(tiles);
    const bool is_here = target >= tiles_before && target < tiles_before + tiles;
    const ushort owner = ushort(simd_min(is_here ? lane : 32u));
    if (owner < 32) {
      tile.sequence.index = base + int(owner);
      tile.sequence.first = simd_shuffle(first, owner);
      tile.sequence.queries = simd_shuffle(last, owner) - tile.sequence.first;
      tile.sequence.keys = keys_of_sequence(from, parameters, tile.sequence.index);
      const int64_t first_row = int64_t(target - simd_shuffle(tiles_before, owner)) * parameters.rows;
      tile.first_row = int(min(first_row, int64_t(parameters.query_rows)));
      tile.rows = min(parameters.rows, rows_of(parameters, tile.sequence.queries) - tile.first_row);
      return tile;
    }
    carried_boundary = simd_shuffle(last, ushort(31));
    carried_tiles = simd_shuffle(tiles_before + tiles, ushort(31));
  }
  return tile;
}

// One thread per sequence calls this.
METAL_FUNC void report_sequence(
    Requests from, constant PagedParameters& parameters, int index, device ErrorLog* errors) {
  const int64_t first = read_boundary(from, parameters, index);
  const int64_t last = read_boundary(from, parameters, index + 1);
  const bool starts_wrong = first < 0 || (index == 0 && first != 0);
  if (starts_wrong || first > last || last > parameters.tokens) {
    report_error(
        errors, parameters.op, "cu_seqlens: expected boundaries that start at 0, ascend and end within q, got ",
        starts_wrong ? first : last, starts_wrong ? index : index + 1, __LINE__);
    return;
  }
  if (first == last) return;
  const int64_t keys = read_length(from, parameters, index);
  if (last - first > parameters.max_query_len) {
    report_error(
        errors, parameters.op, "max_query_len: expected at least the queries of a sequence, got fewer than ",
        last - first, index, __LINE__);
  }
  if (keys < last - first || keys > capacity_of(parameters)) {
    report_error(
        errors, parameters.op,
        "seq_lens: expected at least the queries of a sequence and at most the tokens of its blocks, got ", keys, index,
        __LINE__);
  } else if (keys > parameters.max_seq_len) {
    report_error(
        errors, parameters.op, "max_seq_len: expected at least the keys of a sequence, got fewer than ", keys, index,
        __LINE__);
  }
}

struct KeyRange {
  int first, last;  // the range is [first, last)
};

// Returns the keys that a row of a sequence sees.
METAL_FUNC KeyRange seen_by(constant PagedParameters& parameters, PagedSequence sequence, int row) {
  const int position = sequence.keys - sequence.queries + row / parameters.ratio;
  const int first = parameters.window > 0 ? max(0, position - parameters.window + 1) : 0;
  return {first, parameters.causal != 0 ? clamp(position + 1, 0, sequence.keys) : sequence.keys};
}

// Returns the keys that any row of a tile sees. Later queries see later keys.
METAL_FUNC KeyRange seen_by_tile(constant PagedParameters& parameters, RowTile tile) {
  const int first = seen_by(parameters, tile.sequence, tile.first_row).first;
  return {first, max(first, seen_by(parameters, tile.sequence, tile.first_row + tile.rows - 1).last)};
}

// Returns the number of keys in a split. A split has whole rounds of the decoding kernel. Only a sequence with one tile
// of rows is split.
METAL_FUNC int keys_of_split(constant PagedParameters& parameters, KeyRange range) {
  const int keys = range.last - range.first;
  const int even = (keys + parameters.splits - 1) / parameters.splits;
  return max(parameters.least_keys, even + (kKeysOfRound - even % kKeysOfRound) % kKeysOfRound);
}

METAL_FUNC int splits_of(constant PagedParameters& parameters, RowTile tile, KeyRange range) {
  if (rows_of(parameters, tile.sequence.queries) > parameters.rows) return 1;
  const int keys = keys_of_split(parameters, range);
  return max(1, (range.last - range.first + keys - 1) / keys);
}

METAL_FUNC KeyRange range_of_split(constant PagedParameters& parameters, KeyRange range, int splits, int split) {
  if (splits == 1) return range;
  const int keys = keys_of_split(parameters, range);
  const int first = int(min(int64_t(range.first) + int64_t(split) * keys, int64_t(range.last)));
  return {first, min(range.last, first + keys)};
}

// The place of a key in the pool.
struct KeyPlace {
  int64_t block;
  int offset;
};

METAL_FUNC KeyPlace key_place(
    device const int* block_table,
    constant PagedParameters& parameters,
    int sequence,
    int key,
    device ErrorLog* errors) {
  const int page = key / parameters.block_size;
  const int64_t entry = sequence * parameters.table_sequence + page * parameters.table_block;
  const int64_t block = read_index(block_table, entry, parameters.table_bytes);
  if (block < 0 || block >= parameters.blocks) {
    report_error(
        errors, parameters.op, "block_table: expected blocks of the cache, got ", block, page, __LINE__, sequence);
  }
  return {clamp(block, int64_t(0), int64_t(parameters.blocks - 1)), key % parameters.block_size};
}

METAL_FUNC int64_t offset_of(constant PageStrides& strides, KeyPlace place, int head) {
  return place.block * strides.block + place.offset * strides.token + head * strides.head;
}
