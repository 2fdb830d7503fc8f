// Moves S [K, 32] of a threadgroup's 4 simdgroups, 8 columns each as 8x8 blocks in registers, from and to device
// memory.
#pragma once
#include "core/fragment.h"
#include "gdn/state_tile.h"

GDN_CONSTANT int kSimdgroups = kStateThreads / 32;

// Returns the position of an element of S. Pairs of a key's values are exchanged depending on the key, so that four
// rows of a fragment lie in 32 banks, and a column of 16 keys in 16. 8 keys further, the pair changes by 16.
METAL_FUNC int state_place(int key, int value) { return key * kStateColumns + (value ^ (key * 10 & 30)); }

// Returns the position of a lane's two elements in the 8 rows from `row` on. `first` is their position in rows 0 to 7.
METAL_FUNC int state_place_below(int first, int row) { return row * kStateColumns + (first ^ (row & 8) * 2); }

// Returns how many keys of S fit `floats` of threadgroup memory: whole 128-byte lines where possible.
METAL_FUNC constexpr int staged_keys(int floats) {
  return floats >= 64 * kStateColumns ? 64 : floats >= 32 * kStateColumns ? 32 : floats >= 16 * kStateColumns ? 16 : 8;
}

// Returns the element of a [keys, 32] part of S that item `item` moves, so that lanes access neighbours in memory.
struct StateItem {
  int key, value;
};

METAL_FUNC StateItem state_item(uint item, uint keys, bool value_inner) {
  constexpr uint kColumns = kStateColumns;
  StateItem at;
  at.key = int(value_inner ? item / kColumns : item % keys);
  at.value = int(value_inner ? item % kColumns : item / keys);
  return at;
}

// Moves S [K, 32] through `scratch`: a simdgroup reads 128 contiguous bytes in either layout.
template <int K, int Keys, typename P>
METAL_FUNC void load_state(
    thread float2* state,
    device const P* source,
    StateStrides strides,
    int values,
    threadgroup float* scratch,
    uint thread_index,
    uint simdgroup,
    LanePosition at) {
  const int own = state_place(at.row, int(simdgroup) * 8 + at.column);
  UNROLL for (int first = 0; first < K; first += Keys) {
    for (uint item = thread_index; item < uint(Keys * kStateColumns); item += kSimdgroups * 32) {
      const StateItem of = state_item(item, Keys, strides.value <= strides.key);
      const bool inside = first + of.key < K && of.value < values;
      scratch[state_place(of.key, of.value)] =
          inside ? float(source[(first + of.key) * strides.key + of.value * strides.value]) : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int row = 0; row < Keys && first + row < K; row += 8) {
      state[(first + row) / 8] = *(threadgroup const float2*)(scratch + state_place_below(own, row));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

template <int K, int Keys, typename P>
METAL_FUNC void store_state(
    thread const float2* state,
    device P* target,
    StateStrides strides,
    int values,
    threadgroup float* scratch,
    uint thread_index,
    uint simdgroup,
    LanePosition at) {
  const int own = state_place(at.row, int(simdgroup) * 8 + at.column);
  UNROLL for (int first = 0; first < K; first += Keys) {
    UNROLL for (int row = 0; row < Keys && first + row < K; row += 8) {
      *(threadgroup float2*)(scratch + state_place_below(own, row)) = state[(first + row) / 8];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint item = thread_index; item < uint(Keys * kStateColumns); item += kSimdgroups * 32) {
      const StateItem of = state_item(item, Keys, strides.value <= strides.key);
      if (first + of.key < K && of.value < values) {
        target[(first + of.key) * strides.key + of.value * strides.value] = P(scratch[state_place(of.key, of.value)]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
