#pragma once
#include "aura/parameters.h"

// Returns how many vectors a simdgroup encodes with a trellis code. A lane owns one of the 2^(6 - bits) states of a
// vector.
inline constexpr int trellis_vectors(int bits) { return 32 >> (kWindowBits - bits); }

struct EncodeParameters {
  VectorParameters vectors;
  VectorStrides x, codes, norms, tile_means;
  int64_t slot_batch, slot_token;  // strides of `slots`
  int32_t slot_bytes;              // size of a slot number: 4 or 8; 0 without `slots`, where token t goes to slot t
  int32_t capacity;                // number of slots in the cache
  int32_t has_tile_means;
  OpName op;
};
