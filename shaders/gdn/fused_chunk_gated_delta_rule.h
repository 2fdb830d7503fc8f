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
  int32_t has_norm;            // if 1, q and k are normalised
  int32_t output_is_f32;       // if 1, o is f32, else T
  int32_t counted_chunk_size;  // chunk size that NT was computed with; 0 skips the check of NT
  float scale;
};
