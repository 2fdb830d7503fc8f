#pragma once
#include "attention/paged_attention_decode.h"
#include "attention/paged_attention_prefill.h"

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
