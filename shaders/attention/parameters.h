// The kernels that use pages share these definitions with the host.
#pragma once
#include "core/parameters.h"

// Strides in elements of pages [blocks, block_size, H, D]. The last stride is 1.
struct PageStrides {
  int64_t block, token, head;
};

// Describes slot_mapping, which gives the slots of new tokens in a cache.
struct CacheSlotParameters {
  int64_t stride;    // of slot_mapping, in elements
  int32_t bytes;     // size of a slot: 4 or 8
  int32_t tokens;    // only the first `tokens` tokens have a slot
  int32_t capacity;  // number of slots in the cache
  int32_t block_size;
  PageStrides key, value;  // strides of the caches
};

// Strides in elements of packed tokens [T, H, D]. The last stride is 1.
struct TokenStrides {
  int64_t token, head;
};
