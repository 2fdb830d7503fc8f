// The slots of a pool: which one each sequence has, once check_slots() has passed them.
#pragma once
#include <vector>

#include "ops/check.h"

namespace torch_gdn::cpu {

struct Slot {
  int64_t index;   // -1: none; the sequence gives zeros and leaves the pool alone
  bool has_state;  // else it starts from zeros
};

inline std::vector<Slot> slots_of(int64_t N, const optional<Tensor>& state_indices,
                                  const optional<Tensor>& has_initial_state, int64_t null_index) {
  std::vector<Slot> slots(N);
  for (int64_t n = 0; n < N; ++n) slots[n] = {n, true};
  if (state_indices.has_value()) {
    const Tensor indices = state_indices->to(at::kLong);
    const auto at = indices.accessor<int64_t, 1>();
    for (int64_t n = 0; n < N; ++n) slots[n].index = at[n] <= null_index ? -1 : at[n];
  }
  if (has_initial_state.has_value()) {
    const auto at = has_initial_state->accessor<bool, 1>();
    for (int64_t n = 0; n < N; ++n) slots[n].has_state = at[n];
  }
  return slots;
}

}  // namespace torch_gdn::cpu
