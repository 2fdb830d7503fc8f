#pragma once
#include "core/channel_gate_parameters.h"
#include "gdn/state_tile.h"

// A thread holds K / 4 floats of S for K up to 128, and K / 8 for larger K. More floats would spill.
constexpr int recurrent_threads(int K) { return K > 128 ? 2 * kStateThreads : kStateThreads; }

// The decays of channels (1 if absent), and beta per value column.
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
  int32_t initial_has_vectors, final_has_vectors;  // if 1, a load or store takes 4 elements of the inner dimension
  int32_t v_type, o_type;                          // ElementType
  int32_t counted_chunk_size;                      // chunk size that NT was computed with; 0 skips the check
  float scale;
};
