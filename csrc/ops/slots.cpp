#include "ops/slots.h"

#include <unordered_set>

namespace torch_gdn {

namespace {

// Those of the sequences, as far as the host can read them.
std::unordered_set<int64_t> slots_on_cpu(const StatePool& pool, int64_t N) {
  std::unordered_set<int64_t> taken;
  if (!pool.indices.has_value()) {
    for (int64_t n = 0; n < N; ++n) taken.insert(n);
  } else if (pool.indices->is_cpu()) {
    const Tensor indices = pool.indices->to(at::kLong).flatten();
    const auto at = indices.accessor<int64_t, 1>();
    for (int64_t n = 0; n < at.size(0); ++n) taken.insert(at[n]);
  }
  return taken;
}

}  // namespace

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

void check_checkpoint_contents(const char* op, const StatePool& pool, const ChunkShape<>& s,
                               const optional<Tensor>& cu_seqlens, int64_t multiple) {
  if (!pool.checkpoint_offsets->is_cpu() || !pool.checkpoint_indices->is_cpu()) return;
  const Tensor offsets = pool.checkpoint_offsets->to(at::kLong), indices = pool.checkpoint_indices->to(at::kLong);
  const auto offset = offsets.accessor<int64_t, 1>(), index = indices.accessor<int64_t, 1>();
  const bool has_lengths = !s.packed || cu_seqlens->is_cpu();
  const Tensor boundaries = s.packed && has_lengths ? cu_seqlens->to(at::kLong) : Tensor();
  auto taken = slots_on_cpu(pool, s.N);
  for (int64_t n = 0; n < s.N; ++n) {
    if (offset[n] == 0 || index[n] <= pool.null_index) continue;
    const int64_t tokens =
        boundaries.defined() ? boundaries[n + 1].item<int64_t>() - boundaries[n].item<int64_t>() : s.T;
    TORCH_CHECK_VALUE(offset[n] > 0 && offset[n] % multiple == 0 && offset[n] <= tokens, op,
                      ": checkpoint_offsets: expected multiples of ", multiple, " up to the tokens of a sequence, got ",
                      offset[n], " for ", tokens, " tokens at ", n);
    TORCH_CHECK_VALUE(index[n] < pool.states.size(0), op,
                      ": checkpoint_indices: expected indices below the number of slots, got ", index[n], " for ",
                      pool.states.size(0), " slots");
    TORCH_CHECK_VALUE(taken.insert(index[n]).second, op, ": checkpoint_indices: expected each slot at most once, got ",
                      index[n], " again at ", n);
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
