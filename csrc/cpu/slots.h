// The slots of a pool: which one each sequence has, once check_slots() has passed them.
#pragma once
#include <vector>

#include "ops/slots.h"

namespace torch_gdn::cpu {

struct Slot {
  int64_t index;   // -1: none; the sequence gives zeros and leaves the pool alone
  bool has_state;  // else it starts from zeros
};

inline std::vector<Slot> slots_of(int64_t N, const StatePool& pool) {
  std::vector<Slot> slots(N);
  for (int64_t n = 0; n < N; ++n) slots[n] = {n, true};
  if (pool.indices.has_value()) {
    const Tensor indices = pool.indices->to(at::kLong);
    const auto at = indices.accessor<int64_t, 1>();
    for (int64_t n = 0; n < N; ++n) slots[n].index = at[n] <= pool.null_index ? -1 : at[n];
  }
  if (pool.has_initial_state.has_value()) {
    const auto at = pool.has_initial_state->accessor<bool, 1>();
    for (int64_t n = 0; n < N; ++n) slots[n].has_state = at[n];
  }
  return slots;
}

}  // namespace torch_gdn::cpu
