// Moves S [K, 32] of a threadgroup from and to device memory. Each of the 4 simdgroups holds 8 columns as 8x8 blocks in
// registers.
#pragma once
#include "core/exponential.h"
#include "core/fragment.h"
#include "gdn/parameters.h"

GDN_CONSTANT int kSimdgroups = kStateThreads / 32;

// Returns the position of an element of S. The key decides how pairs of its values are exchanged, so that four rows of
// a fragment lie in 32 banks, and a column of 16 keys lies in 16. 8 keys further, the pair has moved by 16 values.
METAL_FUNC int state_place(int key, int value) { return key * kStateColumns + (value ^ (key * 10 & 30)); }

// Returns the position of a lane's two elements in the 8 rows from `row` on. `first` is their position in rows 0 to 7.
METAL_FUNC int state_place_below(int first, int row) { return row * kStateColumns + (first ^ (row & 8) * 2); }

// Returns how many keys of S fit in `floats` of threadgroup memory. They fill whole 128-byte lines if possible.
METAL_FUNC constexpr int staged_keys(int floats) {
  return floats >= 64 * kStateColumns ? 64 : floats >= 32 * kStateColumns ? 32 : floats >= 16 * kStateColumns ? 16 : 8;
}

// The element of a part [keys, 32] of S that work item `item` moves. Lanes access neighbours in memory.
struct StateItem {
  int key, value;
};

METAL_FUNC StateItem state_item(uint item, uint keys, bool value_inner) {
  constexpr uint kColumns = kStateColumns;
  return {int(value_inner ? item / kColumns : item % keys), int(value_inner ? item % kColumns : item / keys)};
}

// Moves S [K, 32] through `scratch`. A simdgroup reads 128 contiguous bytes in either layout.
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

// Multiplies row i of S by exp(log_decays[i]).
template <int K>
METAL_FUNC void decay_channels(thread float2* state, device const float* log_decays, LanePosition at) {
  UNROLL for (int depth = 0; depth < (K + 7) / 8; ++depth) {
    const int channel = depth * 8 + at.row;
    const Decay decay = decay_from_log(channel < K ? log_decays[channel] : 0.0f);
    const float2 change = decay.factor * state[depth];
    state[depth] = (decay.weak ? 1.0f : 0.0f) * state[depth] + change;
  }
}
