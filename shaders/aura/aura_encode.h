#pragma once
#include "aura/parameters.h"

struct EncodeParameters {
  VectorParameters vectors;
  VectorStrides x, codes, norms, means;
  int64_t slot_batch, slot_token;  // strides of the slots
  int32_t slot_bytes;              // of a slot: 4 or 8; 0 where token t goes to slot t
  int32_t capacity;                // slots of the cache
  int32_t has_means;
  OpName op;
};
