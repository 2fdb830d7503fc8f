// The slot of a sequence in a pool of states, from state_indices on the device. An index past the pool, or one that an
// earlier sequence has, gives no slot: no write outside the pool, no two sequences on one state. report_slot() tells
// the user. Beyond 32 sequences locate_slots.metal searches once for all threadgroups.
#pragma once
#include <metal_stdlib>

#include "core/error.h"
#include "core/parameters.h"
using namespace metal;

struct Slot {
  int64_t index;
  bool is_present;  // else o is zeros and the pool stays
  bool has_state;   // else from zeros
  bool is_outside, is_taken;
};

METAL_FUNC int64_t slot_index(device const int* indices, constant SlotParameters& slots, int sequence) {
  if (slots.index_bytes == 4) return indices[sequence * slots.index_stride];
  return ((device const int64_t*)indices)[sequence * slots.index_stride];
}

// Every lane of the simdgroup must call.
METAL_FUNC Slot locate_slot(
    device const int* indices, device const uchar* flags, constant SlotParameters& slots, int sequence, uint lane) {
  Slot slot;
  slot.index = sequence;
  slot.is_present = true;
  slot.is_outside = false;
  slot.is_taken = false;
  slot.has_state = slots.has_flags == 0 || flags[sequence * slots.flag_stride] != 0;
  if (slots.index_bytes == 0) return slot;

  slot.index = slot_index(indices, slots, sequence);
  const bool is_null = slot.index <= slots.null_index;
  slot.is_present = !is_null;
  if (slots.is_checked != 0) return slot;

  int earlier = 0;
  for (int other = int(lane); other < sequence; other += 32) {
    if (slot_index(indices, slots, other) == slot.index) earlier = 1;
  }
  earlier = simd_max(earlier);
  slot.is_outside = slot.index >= slots.slots;
  slot.is_taken = earlier != 0 && !is_null && !slot.is_outside;
  slot.is_present = !is_null && !slot.is_outside && !slot.is_taken;
  return slot;
}

// Called by one thread for each sequence.
METAL_FUNC void report_slot(Slot slot, device ErrorLog* errors) {
  if (slot.is_outside) report_error(errors, "state_indices", "expected indices below the number of slots", __LINE__);
  if (slot.is_taken) report_error(errors, "state_indices", "expected each slot at most once", __LINE__);
}
