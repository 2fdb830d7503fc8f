// The slot in a pool for each sequence, or for each of its tokens. check_slots() must have accepted them.
#pragma once
#include <vector>

#include "ops/indices.h"
#include "ops/slots.h"

namespace torch_gdn::cpu {

struct Slot {
  int64_t index;   // -1 means no slot: the sequence gives zeros and does not change the pool
  bool has_state;  // if false, the state starts from zeros
};

// state_indices [N, tokens], with -1 for a token without a slot. It is empty if each sequence has one slot.
struct TokenSlots {
  int64_t tokens = 0;
  std::vector<int64_t> index;

  int64_t of(int64_t n, int64_t token) const { return index[n * tokens + token]; }
};

// Returns the number of accepted tokens of each sequence. It is 1 without num_accepted_tokens.
inline std::vector<int64_t> accepted_counts(int64_t N, const StatePool& pool) {
  std::vector<int64_t> counts(N, 1);
  if (!pool.num_accepted_tokens.has_value()) return counts;
  const Indices at(*pool.num_accepted_tokens);
  for (int64_t n = 0; n < N; ++n) counts[n] = at[n];
  return counts;
}

inline TokenSlots token_slots_of(int64_t N, const StatePool& pool) {
  if (!pool.has_slot_per_token()) return {};
  const Indices at(*pool.indices);
  const int64_t tokens = pool.indices->size(1);
  TokenSlots slots{tokens, std::vector<int64_t>(N * tokens)};
  for (int64_t i = 0; i < N * tokens; ++i) {
    const int64_t index = at.at(i / tokens, i % tokens);
    slots.index[i] = index <= pool.null_index ? -1 : index;
  }
  return slots;
}

// A checkpoint stores the state after some tokens of a sequence in a slot of its own.
struct Checkpoint {
  int64_t tokens, index;  // tokens is 0 if there is no checkpoint
};

inline std::vector<Checkpoint> checkpoints_of(int64_t N, const StatePool& pool) {
  std::vector<Checkpoint> checkpoints(N, {0, -1});
  if (!pool.checkpoint_offsets.has_value()) return checkpoints;
  const Indices offset(*pool.checkpoint_offsets), index(*pool.checkpoint_indices);
  for (int64_t n = 0; n < N; ++n) {
    if (index[n] > pool.null_index) checkpoints[n] = {offset[n], index[n]};
  }
  return checkpoints;
}

// Returns the slot that each sequence resumes from.
inline std::vector<Slot> slots_of(int64_t N, const StatePool& pool) {
  std::vector<Slot> slots(N);
  for (int64_t n = 0; n < N; ++n) slots[n] = {n, true};
  if (pool.has_slot_per_token()) {
    const auto accepted = accepted_counts(N, pool);
    const auto slot_table = token_slots_of(N, pool);
    for (int64_t n = 0; n < N; ++n) slots[n].index = slot_table.of(n, accepted[n] - 1);
  } else if (pool.indices.has_value()) {
    const Indices at(*pool.indices);
    for (int64_t n = 0; n < N; ++n) slots[n].index = at[n] <= pool.null_index ? -1 : at[n];
  }
  if (pool.has_initial_state.has_value()) {
    const auto at = pool.has_initial_state->accessor<bool, 1>();
    for (int64_t n = 0; n < N; ++n) slots[n].has_state = at[n];
  }
  return slots;
}

}  // namespace torch_gdn::cpu
