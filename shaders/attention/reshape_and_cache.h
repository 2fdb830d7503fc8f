#pragma once
#include "attention/parameters.h"

GDN_CONSTANT int kCacheThreads = 128;  // per threadgroup, which owns a token

struct CacheParameters {
  TokenStrides key, value;
  CacheSlotParameters slots;
  int32_t heads;
  int32_t key_size, value_size;
  OpName op;
};
