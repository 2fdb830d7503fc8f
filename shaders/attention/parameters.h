// What the kernels that store tokens in pages share with their hosts.
#pragma once
#include "layers/parameters.h"

// Strides in elements of pages [blocks, block_size, H, D]. The last stride is 1.
struct PageStrides {
  int64_t block, token, head;
};

// Describes slot_mapping, which gives the slots of new tokens in a cache.
struct CacheSlotParameters {
  int64_t stride;    // of slot_mapping, in elements
  int32_t bytes;     // size of a slot: 4 or 8
  int32_t tokens;    // only the first `tokens` tokens have a slot
  int32_t capacity;  // number of slots in the cache
  int32_t block_size;
  PageStrides key, value;  // strides of the caches
};

// Strides in elements of packed tokens [T, H, D]. The last stride is 1.
struct TokenStrides {
  int64_t token, head;
};

GDN_CONSTANT int kSlotThreads = 128;  // per threadgroup; a thread owns a token

struct SlotMappingParameters {
  int64_t table_sequence, table_block, position, boundary, slot;    // strides in elements
  int32_t table_bytes, position_bytes, boundary_bytes, slot_bytes;  // size of a number: 4 or 8
  int32_t tokens;                                                   // number of positions
  int32_t slots;                                                    // entries of slot_mapping, at least `tokens`
  int32_t sequences;
  int32_t table_tokens;  // tokens in the blocks of a sequence
  int64_t last_block;    // the largest block whose slots slot_mapping can hold
  int32_t block_size;
  OpName op;
};

GDN_CONSTANT int kCacheThreads = 128;  // per threadgroup, which owns a token

struct CacheParameters {
  TokenStrides key, value;
  CacheSlotParameters slots;
  int32_t heads;
  int32_t key_size, value_size;
  OpName op;
};

struct QkNormRopeAndCacheParameters {
  int32_t rows, tokens, heads;  // [B, T, HQ + 2 HK]
  int32_t q_heads, kv_heads;    // HQ, HK
  int32_t value_size;           // DV
  RowStrides q, k, v, q_out;
  Rotation rotation;
  CacheSlotParameters slots;
  OpName op;
};
