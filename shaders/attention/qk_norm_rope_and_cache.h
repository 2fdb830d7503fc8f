#pragma once
#include "attention/parameters.h"
#include "layers/rotation.h"

struct QkNormRopeAndCacheParameters {
  int32_t rows, tokens, heads;  // [B, T, HQ + 2 HK]
  int32_t q_heads, kv_heads;    // HQ, HK
  int32_t value_size;           // DV
  RowStrides q, k, v, q_out;
  Rotation rotation;
  CacheSlotParameters slots;
  OpName op;
};
