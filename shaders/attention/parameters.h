// What the kernels of pages share with the host.
#pragma once
#include "core/parameters.h"

// Strides in elements of pages [blocks, block_size, H, D]; the last is 1.
struct PageStrides {
  int64_t block, token, head;
};

// slot_mapping, the slots of new tokens in a cache.
struct CacheSlotParameters {
  int64_t stride;    // in elements
  int32_t bytes;     // of a slot: 4 or 8
  int32_t tokens;    // that have one: the first ones
  int32_t capacity;  // slots of the cache
  int32_t block_size;
  PageStrides key, value;  // of the caches
};

// Strides in elements of packed tokens [T, H, D]; the last is 1.
struct TokenStrides {
  int64_t token, head;
};
