#pragma once
#include "core/parameters.h"

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
