#pragma once
#include "aura/parameters.h"

struct EncodeParameters {
  VectorParameters vectors;
  VectorStrides x, codes, norms, means;
  int64_t slot_batch, slot_token;  // strides of the slots, in 32-bit words
  int32_t slot_words;              // of a slot: 1 or 2; 0 where token t goes to slot t
  int32_t capacity;                // slots of the cache
  int32_t has_means;
};
