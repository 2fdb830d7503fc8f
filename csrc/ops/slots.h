// A pool of states, which is updated in place. There is one slot per sequence or one per token. An index up to
// null_index means "no slot"; servers use -1 or 0.
#pragma once
#include "ops/chunk_shape.h"

namespace torch_gdn {

struct StatePool {
  Tensor states;  // [slots, ...]
  optional<Tensor> indices, has_initial_state;
  int64_t null_index = -1;
  // The number of accepted tokens of the previous step. Decoding resumes from the state after the last accepted one.
  optional<Tensor> num_accepted_tokens;

  // The state after this many tokens of a sequence (0 for none) also goes to this slot.
  optional<Tensor> checkpoint_offsets, checkpoint_indices;

  auto slots() { return std::tie(states, indices, has_initial_state, null_index); }
  bool has_slot_per_token() const { return indices.has_value() && indices->dim() == 2; }
};

// Checks the contents of tensors on the CPU. If a tensor is on the device, the kernels check it.
void check_state_indices(const char* op, const StatePool& pool);
void check_accepted_counts(const char* op, const StatePool& pool, int64_t most);

// Checks that offsets are multiples of `multiple`.
void check_checkpoint_contents(const char* op, const StatePool& pool, const ChunkShape<>& s,
                               const optional<Tensor>& cu_seqlens, int64_t multiple);

// `most` is the largest count after which a sequence can resume.
template <typename Int>
void check_num_accepted_tokens(const Check<Int>& check, const Int& N, const StatePool& pool, const Int& most) {
  if (!pool.num_accepted_tokens.has_value()) return;
  check.is_number_per_sequence("num_accepted_tokens", *pool.num_accepted_tokens, N);
  if constexpr (is_run<Int>) check_accepted_counts(check.op(), pool, most);
}

template <typename Int>
void check_slots(const Check<Int>& check, const Int& N, const StatePool& pool, bool slot_per_token = false) {
  const Int slots = size_of<Int>(pool.states, 0);
  if constexpr (!is_run<Int>) {  // a call that runs makes the whole check of written tensors
    for (int64_t d = 0; d < pool.states.dim(); ++d) {
      if (pool.states.sym_stride(d) != 0) continue;
      check.value(sym_le(pool.states.sym_size(d), Int(1)), "state_pool", "elements that do not overlap", "strides ",
                  pool.states.sym_strides());
    }
  }
  check.value(pool.null_index == -1 || pool.null_index == 0, "null_index", "-1 or 0", pool.null_index);
  if (pool.has_initial_state.has_value()) check.is_bool("has_initial_state", *pool.has_initial_state).shape("[N]", {N});
  if (!pool.indices.has_value()) {
    check.value(sym_ge(slots, N), "state_pool", "a slot for each sequence", slots, " slots for ", N, " sequences");
    return;
  }
  check.is_index_array("state_indices", *pool.indices);
  const bool fits = pool.indices->dim() == 1 || (slot_per_token && pool.indices->dim() == 2);
  check.value(fits && holds(sym_eq(size_of<Int>(*pool.indices, 0), N)), "state_indices",
              slot_per_token ? "shape [N] or [N, tokens]" : "shape [N], one per sequence", sizes_of<Int>(*pool.indices),
              " for ", N, " sequences");
  if constexpr (is_run<Int>) check_state_indices(check.op(), pool);
}

// Returns the number of columns of slots, one per token, or nothing if there is one slot per sequence.
template <typename Int>
optional<Int> check_columns_of_slots(const Check<Int>& check, const StatePool& pool, const ChunkShape<Int>& s,
                                     const optional<Tensor>& cu_seqlens) {
  if (!pool.has_slot_per_token()) {
    check.value(!pool.num_accepted_tokens.has_value(), "num_accepted_tokens",
                "None when state_indices is not [N, tokens]", "a tensor");
    return std::nullopt;
  }
  const Int columns = size_of<Int>(*pool.indices, 1);
  check.value(sym_ge(columns, Int(1)), "state_indices", "at least one column", columns);
  check_tokens_of_sequences(check, "state_indices", "a column for each token of a sequence", s, cu_seqlens, columns);
  return columns;
}

template <typename Int>
void check_checkpoints(const Check<Int>& check, const StatePool& pool, const ChunkShape<Int>& s,
                       const optional<Tensor>& cu_seqlens, int64_t multiple) {
  const auto& offsets = pool.checkpoint_offsets;
  const auto& indices = pool.checkpoint_indices;
  check.value(offsets.has_value() || !indices.has_value(), "checkpoint_offsets",
              "a tensor when checkpoint_indices is one", "None");
  check.value(indices.has_value() || !offsets.has_value(), "checkpoint_indices",
              "a tensor when checkpoint_offsets is one", "None");
  if (!offsets.has_value()) return;
  check.is_number_per_sequence("checkpoint_offsets", *offsets, s.N);
  check.is_number_per_sequence("checkpoint_indices", *indices, s.N);
  if constexpr (is_run<Int>) check_checkpoint_contents(check.op(), pool, s, cu_seqlens, multiple);
}

}  // namespace torch_gdn
