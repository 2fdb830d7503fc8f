#pragma once
#include "gdn/state_tile.h"

struct ChunkFwdHParameters {
  SequenceParameters sequence;
  SlotParameters slots;
  CheckpointParameters checkpoints;
  RowStrides k;
  StateStrides initial_state, final_state, h;  // for h, the sequence stride is the stride of chunks
  HeadGroups heads;
  int32_t value_heads;
  int32_t has_initial_state, has_final_state;
};
