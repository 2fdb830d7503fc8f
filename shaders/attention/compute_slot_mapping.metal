// Thread i owns token i and boundary i. Token t of sequence n at position p gets the slot
//
//   slot_mapping[t] = block_table[n, p / block_size] * block_size + p % block_size
//
// Entries at and after the last boundary become -1. Wrong numbers are reported, and their slots become -1 too.
// Layout: positions [T], cu_seqlens [N + 1], block_table [N, blocks], slot_mapping [slots], of 4 or 8 bytes, with any
// stride.
#include "attention/parameters.h"
#include "core/error.h"
#include "core/indices.h"

METAL_FUNC int64_t boundary_at(device const int* cu_seqlens, constant SlotMappingParameters& p, int n) {
  return read_index(cu_seqlens, n * p.boundary, p.boundary_bytes);
}

METAL_FUNC void check_boundary(
    device const int* cu_seqlens, constant SlotMappingParameters& p, int n, device ErrorLog* errors) {
  const int64_t here = boundary_at(cu_seqlens, p, n);
  if (n == 0 && here != 0) {
    report_error(errors, p.op, "cu_seqlens: expected the first boundary to be 0, got ", here, -1, __LINE__);
  }
  if (n == p.sequences && here > p.tokens) {
    report_error(
        errors, p.op, "cu_seqlens: expected boundaries up to the number of positions, got ", here, n, __LINE__);
  }
  if (n < p.sequences && here > boundary_at(cu_seqlens, p, n + 1)) {
    report_error(errors, p.op, "cu_seqlens: expected ascending boundaries, got ", here, n, __LINE__);
  }
}

// Returns the last sequence that starts at or before the token.
METAL_FUNC int sequence_of(device const int* cu_seqlens, constant SlotMappingParameters& p, int token) {
  int first = 0, last = p.sequences - 1;
  while (first < last) {
    const int middle = (first + last + 1) / 2;
    if (boundary_at(cu_seqlens, p, middle) <= token) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return first;
}

METAL_FUNC int64_t slot_of(
    device const int* positions,
    device const int* cu_seqlens,
    device const int* block_table,
    constant SlotMappingParameters& p,
    int token,
    device ErrorLog* errors) {
  if (token >= p.tokens || token >= boundary_at(cu_seqlens, p, p.sequences)) return -1;
  const int sequence = sequence_of(cu_seqlens, p, token);
  const int64_t position = read_index(positions, token * p.position, p.position_bytes);
  if (position < 0 || position >= p.table_tokens) {
    report_error(
        errors, p.op, "positions: expected positions within the blocks of block_table, got ", position, token,
        __LINE__);
    return -1;
  }
  const int column = int(position) / p.block_size;  // in 32 bits: Apple's GPUs have no 64-bit division
  const int64_t block = read_index(block_table, sequence * p.table_sequence + column * p.table_block, p.table_bytes);
  if (block < 0 || block > p.last_block) {
    report_error(
        errors, p.op, "block_table: expected blocks whose slots slot_mapping can hold, got ", block, column, __LINE__,
        sequence);
    return -1;
  }
  return block * p.block_size + int(position) % p.block_size;
}

template <int Threads>
[[kernel]] void compute_slot_mapping(
    device const int* positions [[buffer(0)]],
    device const int* cu_seqlens [[buffer(1)]],
    device const int* block_table [[buffer(2)]],
    device int* slot_mapping [[buffer(3)]],
    device ErrorLog* errors [[buffer(4)]],
    constant SlotMappingParameters& parameters [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  static_assert(Threads == kSlotThreads, "the host's grid is made of so many threads");
  const int item = int(group.x) * Threads + int(thread_index);
  if (item <= parameters.sequences) check_boundary(cu_seqlens, parameters, item, errors);
  if (item >= parameters.slots) return;
  const int64_t slot = slot_of(positions, cu_seqlens, block_table, parameters, item, errors);
  if (parameters.slot_bytes == 4) {
    slot_mapping[item * parameters.slot] = int(slot);
  } else {
    ((device int64_t*)slot_mapping)[item * parameters.slot] = slot;
  }
}
