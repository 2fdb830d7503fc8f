// Finds the slot of a sequence, or of one of its tokens, in a pool of states. state_indices is on the device, so
// kernels check it. An index past the pool gives no slot, and neither does an index that an earlier entry has. No
// kernel then writes outside the pool, and no two sequences share a state. report_slot() tells the user. For more than
// 32 indices, locate_slots.metal searches once for all threadgroups.
#pragma once
#include <metal_stdlib>

#include "core/error.h"
#include "core/indices.h"
#include "core/parameters.h"
using namespace metal;

struct Slot {
  int64_t index;
  bool is_present;  // if false, o is zeros and the pool keeps its states
  bool has_state;   // if false, the sequence starts from zeros
  bool is_outside, is_taken;
};

// `entry` counts the entries of state_indices row by row. `row` is its row, or 0 with one slot per sequence. It is an
// argument because Apple's GPUs have no 64-bit division.
METAL_FUNC int64_t slot_index(device const int* indices, constant SlotParameters& slots, int64_t entry, int row) {
  return read_index(indices, entry * slots.index_stride + row * slots.row_gap, slots.index_bytes);
}

METAL_FUNC int row_of_entry(constant SlotParameters& slots, int entry) {
  return slots.columns > 0 ? int(uint(entry) / uint(slots.columns)) : 0;
}

// Every lane of the simdgroup must call this.
METAL_FUNC Slot
locate_entry(device const int* indices, constant SlotParameters& slots, int64_t entry, int row, uint lane) {
  Slot slot{entry, true, true, false, false};
  if (slots.index_bytes == 0) return slot;

  slot.index = slot_index(indices, slots, entry, row);
  const bool is_null = slot.index <= slots.null_index;
  slot.is_present = !is_null;
  if (slots.is_checked != 0) return slot;

  int earlier = 0;
  for (int other = int(lane); other < entry; other += 32) {
    if (slot_index(indices, slots, other, row_of_entry(slots, other)) == slot.index) earlier = 1;
  }
  earlier = simd_max(earlier);
  slot.is_outside = slot.index >= slots.slots;
  slot.is_taken = earlier != 0 && !is_null && !slot.is_outside;
  slot.is_present = !is_null && !slot.is_outside && !slot.is_taken;
  return slot;
}

METAL_FUNC bool has_initial_state_of(device const uchar* flags, constant SlotParameters& slots, int sequence) {
  return slots.has_flags == 0 || flags[sequence * slots.flag_stride] != 0;
}

// Finds the slot of a sequence that has only one. Every lane of the simdgroup must call this.
METAL_FUNC Slot locate_slot(
    device const int* indices, device const uchar* flags, constant SlotParameters& slots, int sequence, uint lane) {
  Slot slot = locate_entry(indices, slots, sequence, 0, lane);
  slot.has_state = has_initial_state_of(flags, slots, sequence);
  return slot;
}

// Returns the tensor that holds the states before the first token. In place, that is the pool itself. It is then read
// through the pointer that also writes it, because Metal's compiler assumes that no two arguments name the same written
// memory.
template <typename P>
METAL_FUNC device const P* states_to_read(device const P* states, device P* pool, constant SlotParameters& slots) {
  return slots.slots != 0 ? pool : states;
}

struct AcceptedCount {
  int tokens;       // from 1 to `most`; 1 without num_accepted_tokens
  bool is_outside;  // true if the value read is outside that range
};

METAL_FUNC AcceptedCount
accepted_count(device const int* num_accepted_tokens, constant SlotParameters& slots, int sequence, int most) {
  if (slots.accepted_bytes == 0) return {1, false};
  const int64_t tokens = read_index(num_accepted_tokens, sequence * slots.accepted_stride, slots.accepted_bytes);
  return {tokens < 1 ? 1 : tokens > most ? most : int(tokens), tokens < 1 || tokens > most};
}

// One thread per entry of state_indices calls this.
METAL_FUNC void report_slot(Slot slot, int64_t entry, constant const OpName& op, device ErrorLog* errors) {
  if (slot.is_outside) {
    report_error(
        errors, op, "state_indices: expected indices below the number of slots, got ", slot.index, entry, __LINE__);
  } else if (slot.is_taken) {
    report_error(errors, op, "state_indices: expected each slot at most once, got ", slot.index, entry, __LINE__);
  }
}

// One thread per sequence calls this.
METAL_FUNC void report_accepted(
    AcceptedCount count,
    device const int* num_accepted_tokens,
    constant SlotParameters& slots,
    int64_t sequence,
    constant const OpName& op,
    device ErrorLog* errors) {
  if (!count.is_outside) return;
  report_error(
      errors, op, "num_accepted_tokens: expected counts from 1 to those of a step, got ",
      read_index(num_accepted_tokens, sequence * slots.accepted_stride, slots.accepted_bytes), sequence, __LINE__);
}
