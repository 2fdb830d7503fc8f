// Finds the places of new tokens in the pages of a cache.
#pragma once
#include "attention/parameters.h"
#include "core/error.h"
#include "core/indices.h"

// Returns a token's slot, or -1 if it has none. A slot outside the cache counts as none; a thread whose `reports` is
// true logs it.
METAL_FUNC int slot_of(
    device const int* slot_mapping,
    int token,
    constant CacheSlotParameters& slots,
    bool reports,
    device ErrorLog* errors,
    constant OpName& op) {
  if (token >= slots.tokens) return -1;
  const int64_t slot = read_index(slot_mapping, token * slots.stride, slots.bytes);
  if (slot >= slots.capacity) {
    if (reports) {
      report_error(errors, op, "slot_mapping: expected slots below the cache's size, got ", slot, token, __LINE__);
    }
    return -1;
  }
  return slot < 0 ? -1 : int(slot);
}

METAL_FUNC int64_t offset_of(constant PageStrides& strides, int slot, int block_size) {
  return slot / block_size * strides.block + slot % block_size * strides.token;
}
