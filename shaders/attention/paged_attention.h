// The kernels of paged attention share these definitions with the host.
#pragma once
#include "attention/parameters.h"

GDN_CONSTANT int kKeysOfRound = 128;  // keys per threadgroup and round of the decoding kernel; splits are whole rounds

// Within a sequence, row r of a KV head is query r / ratio and head r % ratio of the KV head's query heads.
struct PagedParameters {
  PageStrides key, value;
  TokenStrides q, out;                                    // rows of q start at multiples of 4 elements
  int64_t table_sequence, table_block, boundary, length;  // strides of block_table, cu_seqlens, seq_lens
  int32_t table_bytes, boundary_bytes, length_bytes;      // size of a number: 4 or 8
  int32_t sequences, tokens;                              // N, T
  int32_t kv_heads, ratio;                                // HK, HQ / HK
  int32_t query_rows;                                     // T * HQ / HK
  int32_t blocks, block_size, table_blocks;
  int32_t max_query_len, max_seq_len;
  int32_t causal, window;  // a window of 0 means no window
  int32_t rows;            // rows in a tile
  int32_t splits;          // most splits of the keys of a sequence that has one tile of rows
  int32_t least_keys;      // least keys per split, in whole rounds
  int32_t has_sinks;
  int32_t has_vectors;  // 1 if every row of the caches starts at a multiple of 4 elements
  float scale;
  OpName op;
};

GDN_CONSTANT int kDecodeRows = 8;        // per threadgroup
GDN_CONSTANT int kDecodeSimdgroups = 4;  // per threadgroup; each reads other keys

GDN_CONSTANT int kPrefillRows = 8;  // per simdgroup

GDN_CONSTANT int kMergeRows = 4;  // per threadgroup, one per simdgroup
