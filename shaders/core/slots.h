// Slots of a pool of states: which one a sequence has, read from state_indices on the device. An index past the pool,
// and a slot that an earlier sequence has, count as none, so that no index, however wrong, leads out of the pool or
// lets two sequences write one state; report_slot() tells the user. Of more than 32 sequences locate_slots.metal looks
// for such indices once, in place of every threadgroup.
#pragma once
#include <metal_stdlib>

#include "core/error.h"
#include "core/parameters.h"
using namespace metal;

struct Slot {
  int64_t index;
  bool is_present;  // else the sequence gives zeros and leaves the pool alone
  bool has_state;   // else it starts from zeros
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

// At the stream's next synchronisation. One thread for each sequence calls it.
METAL_FUNC void report_slot(Slot slot, device ErrorLog* errors) {
  if (slot.is_outside) report_error(errors, "state_indices", "expected indices below the number of slots", __LINE__);
  if (slot.is_taken) report_error(errors, "state_indices", "expected each slot at most once", __LINE__);
}
