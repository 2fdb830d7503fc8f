// Runs the recurrence token by token, for all end-to-end ops. The chunked ops pass their short sequences to it.
#pragma once
#include "cpu/common.h"
#include "ops/gdn/chunk_gated_delta_rule.h"

namespace torch_gdn::cpu {

// For sequences of up to so many tokens the recurrence is faster: a chunk of 1 to 8 tokens costs as much as 8 of its
// tokens. Each sequence is judged by itself, so that its bits do not depend on the sequences packed with it.
constexpr int64_t kFewTokens = 4;

// The recurrence does not keep the states between chunks.
inline int64_t few_tokens_of(const ChunkedRule<int64_t>& op) { return op.return_intermediate_states ? -1 : kFewTokens; }

void run_recurrence(const GatedDeltaRule<>& op, const StateIo& state_io, const Tensor& o);

// Processes only these sequences of the call, on copies of their tokens.
void run_recurrence_of(const std::vector<int64_t>& sequences, const GatedDeltaRule<>& op, const StateIo& state_io,
                       const Tensor& o);

}  // namespace torch_gdn::cpu
