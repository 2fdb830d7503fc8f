#pragma once
#include "attention/parameters.h"

GDN_CONSTANT int kCacheThreads = 128;  // of a threadgroup, which owns a token

struct CacheParameters {
  TokenStrides key, value;
  PageStrides key_cache, value_cache;
  int64_t slot_stride;  // in elements of slot_mapping
  int32_t slot_bytes;   // 4 or 8
  int32_t capacity;     // slots of the cache
  int32_t block_size, heads;
  int32_t key_size, value_size;
  OpName op;
};
