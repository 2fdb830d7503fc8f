#pragma once
#include "gdn/state_tile.h"

struct FusedChunkParameters {
  SequenceParameters sequence;
  SlotParameters slots;
  CheckpointParameters checkpoints;
  RowStrides q, k, v, o;
  StateStrides initial_state, final_state;
  GateParameters gates;
  HeadGroups heads;
  int32_t value_heads, value_size;
  int32_t has_initial_state, has_final_state;
  int32_t has_norm;            // 1 to normalise q and k
  int32_t output_is_f32;       // 1: o is f32, else T
  int32_t counted_chunk_size;  // the chunk size behind NT; 0 to skip the check of NT
  float scale;
};
