#pragma once
#include "aura/parameters.h"

// Returns the vectors of a simdgroup that encodes a trellis code: a lane has one of 2^(6 - bits) states of one vector.
inline constexpr int trellis_vectors(int bits) { return 32 >> (kWindowBits - bits); }

struct EncodeParameters {
  VectorParameters vectors;
  VectorStrides x, codes, norms, tile_means;
  int64_t slot_batch, slot_token;  // strides of the slots
  int32_t slot_bytes;              // of a slot: 4 or 8; 0 where token t goes to slot t
  int32_t capacity;                // slots of the cache
  int32_t has_tile_means;
  OpName op;
};
