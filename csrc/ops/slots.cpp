#include "ops/slots.h"

#include <unordered_set>

namespace torch_gdn {

void check_state_indices(const char* op, const StatePool& pool) {
  if (!pool.indices->is_cpu()) return;
  const Tensor indices = pool.indices->to(at::kLong).flatten();
  const auto at = indices.accessor<int64_t, 1>();
  const int64_t slots = pool.states.size(0);
  std::unordered_set<int64_t> taken;
  for (int64_t n = 0; n < at.size(0); ++n) {
    TORCH_CHECK_VALUE(at[n] < slots, op, ": state_indices: expected indices below the number of slots, got ", at[n],
                      " for ", slots, " slots");
    TORCH_CHECK_VALUE(at[n] <= pool.null_index || taken.insert(at[n]).second, op,
                      ": state_indices: expected each slot at most once, got ", at[n], " again at ", n);
  }
}

void check_accepted_counts(const char* op, const StatePool& pool, int64_t most) {
  if (!pool.num_accepted_tokens->is_cpu()) return;
  const Tensor counts = pool.num_accepted_tokens->to(at::kLong);
  const auto at = counts.accessor<int64_t, 1>();
  for (int64_t n = 0; n < at.size(0); ++n) {
    TORCH_CHECK_VALUE(at[n] >= 1 && at[n] <= most, op, ": num_accepted_tokens: expected counts from 1 to ", most,
                      ", got ", at[n], " at ", n);
  }
}

}  // namespace torch_gdn
