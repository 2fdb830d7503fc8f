// Geometry and parameters of attention to exact rows.
#pragma once
#include "aura/parameters.h"

GDN_CONSTANT int kExactQueryRows = 8;  // of a threadgroup
GDN_CONSTANT int kExactKeys = 128;     // of a tile: 32 a simdgroup
GDN_CONSTANT int kExactColumns = 256;  // of o for a threadgroup, at most

// Row r of a KV head is query r / ratio of its head r % ratio.
struct ExactParameters {
  VectorStrides q, keys, values;
  int32_t kv_heads, ratio, queries;  // HK, HQ / HK, L
  int32_t rows;                      // L * HQ / HK
  int32_t exact, sinks, coded;       // exact rows; those before the codes; codes
  int32_t block_size;                // exact rows of a block: whole tiles
  int32_t first_block, blocks;       // the first of exact rows, and all of a row's partials
  int32_t q_offset, causal, window;  // a window of 0 means none
  int32_t start_words;               // of an element of `starts`: 1 or 2; 0 without `starts`
  int32_t has_vectors;               // every exact row starts at a multiple of 4 elements
  float scale;
};
