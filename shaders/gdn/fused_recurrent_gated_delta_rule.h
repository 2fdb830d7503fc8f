#pragma once
#include "core/channel_gate_parameters.h"
#include "gdn/state_tile.h"

// A thread has K / 4 floats of S for K up to 128, then K / 8: more would spill.
constexpr int recurrent_threads(int K) { return K > 128 ? 2 * kStateThreads : kStateThreads; }

// Decays of channels (1 if absent), and beta of value columns.
struct ChannelParameters {
  ChannelGateParameters gk, gv;
  int32_t has_vector_beta;
};

struct FusedRecurrentParameters {
  SequenceParameters sequence;
  SlotParameters slots;
  CheckpointParameters checkpoints;
  RowStrides q, k, v, o;
  StateStrides initial_state, final_state;
  GateParameters gates;
  ChannelParameters channels;
  HeadGroups heads;
  int32_t value_heads, value_size;
  int32_t has_initial_state, has_final_state;
  int32_t initial_has_vectors, final_has_vectors;  // 1 for 4 elements of the inner dimension per load or store
  int32_t v_type, o_type;                          // ElementType
  int32_t counted_chunk_size;                      // the chunk size behind NT; 0 to skip the check
  float scale;
};
