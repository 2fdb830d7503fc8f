// The kernels that run the rule token by token share this code. S is in registers (gdn/state_rows.h).
#pragma once
#include "core/gates.h"
#include "core/parameters.h"
#include "core/sequences.h"
#include "core/slots.h"
#include "gdn/state_rows.h"

// Adds up the values of the lanes of the thread's own row. Two rows take 3 or 4 shuffles.
template <int K>
METAL_FUNC float sum_of_own_row(float4 first, float4 second, RowPosition at) {
  const float first_sum = (first.x + first.y) + (first.z + first.w);
  const float second_sum = (second.x + second.y) + (second.z + second.w);
  float sum = at.is_odd ? second_sum : first_sum;
  sum += simd_shuffle_xor(at.is_odd ? first_sum : second_sum, ushort(1));
  UNROLL for (ushort distance = 2; distance < Division<K>::kLanes; distance *= 2) {
    sum += simd_shuffle_xor(sum, distance);
  }
  return sum;
}

// Stages rows of q or k in threadgroup memory. The simdgroups take turns at the rows.
template <int K>
METAL_FUNC void normalise_rows(threadgroup float* tile, int rows, uint simdgroup, uint lane) {
  constexpr int kPadded = Division<K>::kPadded;
  for (int row = int(simdgroup); row < rows; row += Division<K>::kThreads / 32) {
    float sum = 0.0f;
    for (int column = int(lane); column < kPadded; column += 32) {
      sum += tile[row * kPadded + column] * tile[row * kPadded + column];
    }
    const float scale = rsqrt(simd_sum(sum) + kNormEps);
    for (int column = int(lane); column < kPadded; column += 32) tile[row * kPadded + column] *= scale;
  }
}

// Computes S <- exp(g) S.
template <int K>
METAL_FUNC void decay_state(thread float4* state, Decay decay) {
  constexpr int kParts = Division<K>::kParts;
  const float factor = decay.factor;
  if (decay.weak) {
    UNROLL for (int m = 0; m < kParts; ++m) {
      UNROLL for (int r = 0; r < 2; ++r) state[2 * m + r] += factor * state[2 * m + r];
    }
  } else {
    UNROLL for (int m = 0; m < kParts; ++m) { UNROLL for (int r = 0; r < 2; ++r) state[2 * m + r] *= factor; }
  }
}

// Computes S <- S + k beta (v - S^T k)^T for the thread's own row, given `beta` and `value`. Returns the row's S^T q.
template <int K>
METAL_FUNC float update_and_read(
    thread float4* state,
    threadgroup const float* key,
    threadgroup const float* query,
    float beta,
    float value,
    RowPosition at) {
  constexpr int kParts = Division<K>::kParts;
  float4 part[2] = {float4(0.0f), float4(0.0f)};
  UNROLL for (int m = 0; m < kParts; ++m) {
    const float4 keys = *(threadgroup const float4*)(key + first_element<K>(m, at.place));
    UNROLL for (int r = 0; r < 2; ++r) part[r] += state[2 * m + r] * keys;
  }
  const float read = sum_of_own_row<K>(part[0], part[1], at);
  const float own_update = beta * (value - read);
  const float other_update = simd_shuffle_xor(own_update, ushort(1));
  const float update[2] = {at.is_odd ? other_update : own_update, at.is_odd ? own_update : other_update};
  UNROLL for (int r = 0; r < 2; ++r) part[r] = float4(0.0f);
  UNROLL for (int m = 0; m < kParts; ++m) {
    const float4 keys = *(threadgroup const float4*)(key + first_element<K>(m, at.place));
    const float4 queries = *(threadgroup const float4*)(query + first_element<K>(m, at.place));
    UNROLL for (int r = 0; r < 2; ++r) {
      state[2 * m + r] += update[r] * keys;
      part[r] += state[2 * m + r] * queries;
    }
  }
  return sum_of_own_row<K>(part[0], part[1], at);
}

// Reports wrong entries of state_indices [N, columns] and wrong counts in num_accepted_tokens. Does not report the
// entry that the sequence starts from. One simdgroup per sequence calls this.
METAL_FUNC void report_token_slots(
    Sequence own,
    device const int* state_indices,
    device const int* num_accepted_tokens,
    constant SlotParameters& slots,
    constant const OpName& op,
    AcceptedCount accepted,
    int sequence,
    device ErrorLog* errors,
    uint lane) {
  const int columns = slots.columns;
  const int tokens = own.last - own.first;
  const int64_t first_entry = int64_t(sequence) * columns;
  for (int column = 0; column < min(columns, tokens); ++column) {
    const Slot kept = locate_entry(state_indices, slots, first_entry + column, sequence, lane);
    if (lane == 0 && column + 1 != accepted.tokens) report_slot(kept, first_entry + column, op, errors);
  }
  if (lane != 0) return;
  report_accepted(accepted, num_accepted_tokens, slots, sequence, op, errors);
  if (columns > 0 && tokens > columns) {
    report_error(
        errors, op, "state_indices: expected a column for each token of a sequence, got fewer than ", tokens, sequence,
        __LINE__);
  }
}
