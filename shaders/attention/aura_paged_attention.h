#pragma once
#include "attention/paged_attention_prefill.h"

// Of exact rows; the strides of slots are those of pages.
struct ExactRowsParameters {
  PageStrides key, value;
  TokenStrides new_key, new_value;
  int64_t slot, start, sink_slot;                    // strides of exact_slots and exact_starts
  int32_t slot_bytes, start_bytes, sink_slot_bytes;  // of a number of theirs: 4 or 8
  int32_t slots;
  int32_t ring;  // rows of a slot that are not of sinks
  int32_t sinks, tail;
};

// Strides in elements of norms [blocks, block_size, H]; those of codes are PagedParameters'.
struct AuraPagedParameters {
  PagedParameters paged;
  PageStrides key_norms, value_norms;
  ExactRowsParameters exact;
};
