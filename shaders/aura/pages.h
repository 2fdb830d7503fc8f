// What the kernels on pages of codes share with their hosts.
#pragma once
#include "attention/paged_attention.h"
#include "attention/parameters.h"
#include "aura/parameters.h"

struct PagedRotateParameters {
  TokenStrides in, out;
  int64_t boundary;        // stride of cu_seqlens
  int32_t boundary_bytes;  // size of a number: 4 or 8
  int32_t sequences, vectors, tokens, heads;
};

// Returns the number of simdgroups in a threadgroup. With up to 8 query rows, each simdgroup has 8 keys of a tile; with
// more, each has 8 of the rows.
inline constexpr int simdgroups_of(int rows, int D) {
  return rows > kDecodeRows ? rows / kPrefillRows : D > 128 ? kDecodeSimdgroups / 2 : kDecodeSimdgroups;
}

// Describes exact rows. The strides of their slots are those of pages.
struct ExactRowsParameters {
  PageStrides key, value;
  TokenStrides new_key, new_value;
  int64_t slot, start, sink_slot;                    // strides of exact_slots, exact_starts and exact_sink_slots
  int32_t slot_bytes, start_bytes, sink_slot_bytes;  // size of a number: 4 or 8
  int32_t slots;
  int32_t ring;  // rows of a slot that hold no sink
  int32_t sinks, tail;
};

// Strides in elements of norms [blocks, block_size, H] and of means [blocks, tiles, H, D]. PagedParameters has the
// strides of codes.
struct AuraPagedParameters {
  PagedParameters paged;
  PageStrides key_norms, value_norms, key_tile_means;
  ExactRowsParameters exact;
  int32_t has_tile_means;
};

GDN_CONSTANT int kMeanThreads = 128;     // per threadgroup; a thread owns a channel of a tile
GDN_CONSTANT int kLeastKeysOfMean = 32;  // with fewer keys, the mean of the previous tile is better

struct PagedTileMeansParameters {
  PagedParameters paged;  // describes the sequences and the block table; a token's only query row is its key
  TokenStrides keys;
  PageStrides tile_means, exact_keys;
  int64_t slot, start;              // strides of exact_slots and exact_starts
  int32_t slot_bytes, start_bytes;  // size of a number: 4 or 8
  int32_t slots;
  int32_t ring;  // rows of a slot that hold no sink
  int32_t sinks, tail;
  int32_t head_size;
};
