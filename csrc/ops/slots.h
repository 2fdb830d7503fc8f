// What the in-place twins accept beside the arguments of the functional ops: a pool of states, one slot a sequence, and
// which slot each sequence has. An index at or below null_index has none: -1 or 0, the two rules that servers have.
#pragma once
#include <ATen/MemoryOverlap.h>

#include <unordered_set>
#include <vector>

#include "ops/check.h"

namespace torch_gdn {

namespace detail {

template <typename Index>
void check_slot_indices(const Check& check, const Tensor& state_indices, int64_t slots, int64_t null_index) {
  const auto at = state_indices.accessor<Index, 1>();
  std::unordered_set<int64_t> taken;
  for (int64_t n = 0; n < at.size(0); ++n) {
    const int64_t index = at[n];
    check.value(index < slots, "state_indices", "indices below the number of slots", index, " for ", slots, " slots");
    if (index <= null_index) continue;
    check.value(taken.insert(index).second, "state_indices", "each slot at most once", index, " again at ", n);
  }
}

}  // namespace detail

inline void check_slots(const Check& check, int64_t N, const Tensor& state_pool, const optional<Tensor>& state_indices,
                        const optional<Tensor>& has_initial_state, int64_t null_index) {
  const int64_t slots = state_pool.size(0);
  check.value(at::has_internal_overlap(state_pool) != at::MemOverlap::Yes, "state_pool",
              "every element at a place of its own", "strides ", state_pool.strides());
  check.value(null_index == -1 || null_index == 0, "null_index", "-1 or 0", null_index);
  if (has_initial_state.has_value()) {
    check.is_boolean("has_initial_state", *has_initial_state);
    check.shape("has_initial_state", *has_initial_state, "[N]", {N});
  }
  if (!state_indices.has_value()) {
    check.value(slots >= N, "state_pool", "a slot for each sequence", slots, " slots for ", N, " sequences");
    return;
  }
  check.integers("state_indices", *state_indices);
  check.value(state_indices->dim() == 1 && state_indices->size(0) == N, "state_indices",
              "shape [N], one for a sequence", state_indices->sizes(), " for ", N, " sequences");
  if (!state_indices->is_cpu()) return;
  if (state_indices->scalar_type() == at::kInt) {
    detail::check_slot_indices<int32_t>(check, *state_indices, slots, null_index);
  } else {
    detail::check_slot_indices<int64_t>(check, *state_indices, slots, null_index);
  }
}

}  // namespace torch_gdn
