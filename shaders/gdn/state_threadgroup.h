// The prologue of every kernel that carries a state. A threadgroup owns 32 value columns of one head of one sequence.
// This finds the sequence's tokens, slot and checkpoint, and reports wrong ones.
#pragma once
#include "core/checkpoints.h"
#include "core/sequences.h"
#include "core/slots.h"
#include "gdn/state_blocks.h"

// The values are the same in every lane, because a kernel branches on them around barriers.
struct StateThreadgroup {
  int64_t head, key_head;
  int first_value, values;  // the columns [first_value, first_value + values) of S
  Sequence sequence;
  Slot slot;
  Checkpoint checkpoint;
};

// Returns the start of the threadgroup's columns in the state of slot 0.
METAL_FUNC int64_t own_columns(StateThreadgroup own, constant StateStrides& strides) {
  return own.head * strides.head + own.first_value * strides.value;
}

// `entry` is the entry of state_indices for the slot that the sequence starts from. `chunk_size` counts the rows of h
// before the sequence. `counted_chunk_size` is the chunk size that NT was computed with; 0 skips the check of NT. Every
// lane must call this.
template <typename Parameters>
METAL_FUNC StateThreadgroup state_threadgroup(
    device const int* cu_seqlens,
    device const int* state_indices,
    device const uchar* has_initial_state,
    device const int* checkpoint_offsets,
    device const int* checkpoint_indices,
    constant Parameters& parameters,
    int64_t entry,
    int value_size,
    int chunk_size,
    int counted_chunk_size,
    device ErrorLog* errors,
    uint3 group,
    uint simdgroup,
    uint lane) {
  const int target = int(group.z);
  const int first_value = int(group.x) * kStateColumns;
  const Sequence sequence = locate_sequence(cu_seqlens, parameters.sequence, target, chunk_size, lane);
  Slot slot = locate_entry(state_indices, parameters.slots, entry, target, lane);
  slot.has_state = has_initial_state_of(has_initial_state, parameters.slots, target);
  const bool is_reporter = group.x == 0 && group.y == 0 && simdgroup == 0 && lane == 0;
  const Checkpoint checkpoint = locate_checkpoint(
      checkpoint_offsets, checkpoint_indices, parameters.checkpoints, state_indices, parameters.slots,
      parameters.sequence, target, sequence.last - sequence.first, errors, is_reporter, lane);
  if (is_reporter) report_slot(slot, entry, parameters.sequence.op, errors);
  if (group.x == 0 && group.y == 0 && group.z == 0 && simdgroup == 0) {
    report_cu_seqlens(cu_seqlens, parameters.sequence, counted_chunk_size, errors, lane);
  }
  const int values = min(kStateColumns, value_size - first_value);
  return {int64_t(group.y), key_head_of(int(group.y), parameters.heads), first_value, values, sequence, slot,
          checkpoint};
}

// Loads the state before the first token. If there is none, it is zeros. `Keys` and the last arguments are those of
// load_state (gdn/state_blocks.h).
template <int K, int Keys, typename P, typename Parameters>
METAL_FUNC void load_first_state(
    thread float2* state,
    StateThreadgroup own,
    device const P* initial_state,
    device P* final_state,
    constant Parameters& parameters,
    threadgroup float* scratch,
    uint thread_index,
    uint simdgroup,
    LanePosition at) {
  UNROLL for (int depth = 0; depth < (K + 7) / 8; ++depth) state[depth] = float2(0.0f);
  if (parameters.has_initial_state == 0 || !own.slot.is_present || !own.slot.has_state) return;
  device const P* states = states_to_read(initial_state, final_state, parameters.slots) +
                           own.slot.index * parameters.initial_state.sequence +
                           own_columns(own, parameters.initial_state);
  load_state<K, Keys>(state, states, parameters.initial_state, own.values, scratch, thread_index, simdgroup, at);
}
