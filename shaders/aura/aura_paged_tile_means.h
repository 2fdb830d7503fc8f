#pragma once
#include "attention/paged_attention.h"

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
