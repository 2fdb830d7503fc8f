// Geometry and parameters of attention to exact rows.
#pragma once
#include "aura/parameters.h"

GDN_CONSTANT int kExactQueryRows = 8;  // query rows per threadgroup
GDN_CONSTANT int kExactKeys = 128;     // keys per tile: 32 for each simdgroup
GDN_CONSTANT int kExactColumns = 256;  // most columns of o per threadgroup

// Row r of a KV head is query r / ratio and head r % ratio of the KV head's query heads.
struct ExactParameters {
  VectorStrides q, keys, values;
  int32_t kv_heads, ratio, queries;  // HK, HQ / HK, L
  int32_t rows;                      // L * HQ / HK
  int32_t exact, sinks, coded;       // numbers of exact rows, of those before the codes, and of codes
  int32_t block_size;                // exact rows per block, in whole tiles
  int32_t first_block, blocks;       // first block of exact rows, and number of all blocks of a row
  int32_t q_offset, causal, window;  // a window of 0 means no window
  int32_t start_words;               // words per element of `starts`: 1 or 2; 0 without `starts`
  int32_t has_vectors;               // 1 if every exact row starts at a multiple of 4 elements
  float scale;
};
