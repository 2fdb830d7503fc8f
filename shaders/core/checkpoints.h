// Finds the slot that keeps a sequence's state after some of its tokens. The kernel reports a wrong offset, an index
// past the pool, and a slot that another sequence uses. None of them gives a checkpoint.
#pragma once
#include "core/slots.h"

struct Checkpoint {
  int64_t index;
  int tokens;  // the sequence's tokens before the checkpoint; -1 if there is no checkpoint
};

// Every lane of the simdgroup must call this. Set is_reporter in one thread per sequence.
METAL_FUNC Checkpoint locate_checkpoint(
    device const int* offsets,
    device const int* indices,
    constant CheckpointParameters& parameters,
    device const int* state_indices,
    constant SlotParameters& slots,
    constant const SequenceParameters& all,
    int sequence,
    int tokens,
    device ErrorLog* errors,
    bool is_reporter,
    uint lane) {
  Checkpoint checkpoint{0, -1};
  if (parameters.multiple == 0) return checkpoint;

  const int64_t offset = read_index(offsets, sequence * parameters.offset_stride, parameters.offset_bytes);
  checkpoint.index = read_index(indices, sequence * parameters.index_stride, parameters.index_bytes);
  int is_taken = 0;  // another sequence uses the slot for its state, or an earlier sequence for its checkpoint
  for (int other = int(lane); other < all.sequences; other += 32) {
    const int64_t state = slots.index_bytes == 0 ? other : slot_index(state_indices, slots, other, 0);
    const bool is_earlier =
        other < sequence && read_index(offsets, other * parameters.offset_stride, parameters.offset_bytes) != 0 &&
        read_index(indices, other * parameters.index_stride, parameters.index_bytes) == checkpoint.index;
    if (is_earlier || state == checkpoint.index) is_taken = 1;
  }
  const bool used = simd_max(is_taken) != 0;
  if (offset == 0 || checkpoint.index <= parameters.null_index) return checkpoint;
  const bool is_outside = checkpoint.index >= slots.slots;
  const bool is_wrong_offset = offset < 0 || offset > tokens || int(offset) % parameters.multiple != 0;
  if (is_reporter && is_wrong_offset) {
    report_error(
        errors, all.op, "checkpoint_offsets: expected multiples of a chunk up to the tokens of a sequence, got ",
        offset, sequence, __LINE__);
  }
  if (is_reporter && is_outside) {
    report_error(
        errors, all.op, "checkpoint_indices: expected indices below the number of slots, got ", checkpoint.index,
        sequence, __LINE__);
  } else if (is_reporter && used) {
    report_error(
        errors, all.op, "checkpoint_indices: expected each slot at most once, got ", checkpoint.index, sequence,
        __LINE__);
  }
  if (!is_wrong_offset && !is_outside && !used) checkpoint.tokens = int(offset);
  return checkpoint;
}
