#include "ops/slots.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "ops/indices.h"

namespace torch_gdn {

namespace {

// Returns those slots of the sequences that the host can read.
std::unordered_set<int64_t> slots_on_cpu(const StatePool& pool, int64_t N) {
  std::unordered_set<int64_t> used;
  if (!pool.indices.has_value()) {
    for (int64_t n = 0; n < N; ++n) used.insert(n);
  } else if (pool.indices->is_cpu()) {
    for_each_index(*pool.indices, [&](int64_t slot, int64_t) { used.insert(slot); });
  }
  return used;
}

}  // namespace

void check_state_indices(const char* op, const StatePool& pool) {
  if (!pool.indices->is_cpu()) return;
  const int64_t slots = pool.states.size(0);
  c10::SmallVector<std::pair<int64_t, int64_t>, 32> used;  // each slot with its position
  for_each_index(*pool.indices, [&](int64_t slot, int64_t i) {
    TORCH_CHECK_VALUE(slot < slots, op, ": state_indices: expected indices below the number of slots, got ", slot,
                      " for ", slots, " slots");
    if (slot > pool.null_index) used.emplace_back(slot, i);
  });
  std::ranges::sort(used);
  const auto twice = std::ranges::adjacent_find(used, {}, &std::pair<int64_t, int64_t>::first);
  TORCH_CHECK_VALUE(twice == used.end(), op, ": state_indices: expected each slot at most once, got ", twice->first,
                    " again at ", (twice + 1)->second);
}

void check_checkpoint_contents(const char* op, const StatePool& pool, const ChunkShape<>& s,
                               const optional<Tensor>& cu_seqlens, int64_t multiple) {
  if (!pool.checkpoint_offsets->is_cpu() || !pool.checkpoint_indices->is_cpu()) return;
  const Indices offset(*pool.checkpoint_offsets), index(*pool.checkpoint_indices);
  const auto boundaries = s.packed && cu_seqlens->is_cpu() ? optional<Indices>(*cu_seqlens) : std::nullopt;
  auto used = slots_on_cpu(pool, s.N);
  for (int64_t n = 0; n < s.N; ++n) {
    if (offset[n] == 0 || index[n] <= pool.null_index) continue;
    const int64_t tokens = boundaries ? (*boundaries)[n + 1] - (*boundaries)[n] : s.T;
    TORCH_CHECK_VALUE(offset[n] > 0 && offset[n] % multiple == 0 && offset[n] <= tokens, op,
                      ": checkpoint_offsets: expected multiples of ", multiple, " up to the tokens of a sequence, got ",
                      offset[n], " for ", tokens, " tokens at ", n);
    TORCH_CHECK_VALUE(index[n] < pool.states.size(0), op,
                      ": checkpoint_indices: expected indices below the number of slots, got ", index[n], " for ",
                      pool.states.size(0), " slots");
    TORCH_CHECK_VALUE(used.insert(index[n]).second, op, ": checkpoint_indices: expected each slot at most once, got ",
                      index[n], " again at ", n);
  }
}

void check_accepted_counts(const char* op, const StatePool& pool, int64_t most) {
  if (!pool.num_accepted_tokens->is_cpu()) return;
  const Indices at(*pool.num_accepted_tokens);
  for (int64_t n = 0; n < at.size(); ++n) {
    TORCH_CHECK_VALUE(at[n] >= 1 && at[n] <= most, op, ": num_accepted_tokens: expected counts from 1 to ", most,
                      ", got ", at[n], " at ", n);
  }
}

}  // namespace torch_gdn
