// The slot that a sequence's state goes to as it is after some of its tokens. A wrong offset, an index past the pool
// and a slot that another sequence has give no checkpoint; report_checkpoint() tells the user.
#pragma once
#include "core/slots.h"

struct Checkpoint {
  int64_t index;
  int tokens;  // of the sequence before it; -1: there is none
  bool is_wrong_offset, is_outside, is_taken;
};

// Every lane of the simdgroup must call.
METAL_FUNC Checkpoint locate_checkpoint(
    device const int* offsets,
    device const int* indices,
    constant CheckpointParameters& parameters,
    device const int* state_indices,
    constant SlotParameters& slots,
    int sequences,
    int sequence,
    int tokens,
    uint lane) {
  Checkpoint checkpoint;
  checkpoint.index = 0;
  checkpoint.tokens = -1;
  checkpoint.is_wrong_offset = false;
  checkpoint.is_outside = false;
  checkpoint.is_taken = false;
  if (parameters.multiple == 0) return checkpoint;

  const int64_t offset = read_index(offsets, sequence * parameters.offset_stride, parameters.offset_bytes);
  checkpoint.index = read_index(indices, sequence * parameters.index_stride, parameters.index_bytes);
  int taken = 0;
  for (int other = int(lane); other < sequences; other += 32) {
    const int64_t state = slots.index_bytes == 0 ? other : slot_index(state_indices, slots, other);
    const bool is_earlier =
        other < sequence && read_index(offsets, other * parameters.offset_stride, parameters.offset_bytes) != 0 &&
        read_index(indices, other * parameters.index_stride, parameters.index_bytes) == checkpoint.index;
    if (is_earlier || state == checkpoint.index) taken = 1;
  }
  taken = simd_max(taken);
  const bool is_wanted = offset != 0 && checkpoint.index > parameters.null_index;
  checkpoint.is_wrong_offset = is_wanted && (offset < 0 || offset > tokens || offset % parameters.multiple != 0);
  checkpoint.is_outside = is_wanted && checkpoint.index >= slots.slots;
  checkpoint.is_taken = is_wanted && !checkpoint.is_outside && taken != 0;
  const bool is_wrong = checkpoint.is_wrong_offset || checkpoint.is_outside || checkpoint.is_taken;
  if (is_wanted && !is_wrong) checkpoint.tokens = int(offset);
  return checkpoint;
}

// Called by one thread for each sequence.
METAL_FUNC void report_checkpoint(Checkpoint checkpoint, device ErrorLog* errors) {
  if (checkpoint.is_wrong_offset) {
    report_error(
        errors, "checkpoint_offsets", "expected multiples of a chunk up to the tokens of a sequence", __LINE__);
  }
  if (checkpoint.is_outside) {
    report_error(errors, "checkpoint_indices", "expected indices below the number of slots", __LINE__);
  }
  if (checkpoint.is_taken) report_error(errors, "checkpoint_indices", "expected each slot at most once", __LINE__);
}
