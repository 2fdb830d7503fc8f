// Runs the recurrence token by token, for all end-to-end ops. The chunked ops pass their short sequences to it.
#pragma once
#include "cpu/common.h"
#include "ops/gdn/rules.h"

namespace torch_gdn::cpu {

// The recurrence is faster for sequences of up to this many tokens. A chunk of 1 to 8 tokens takes as long as 8 tokens
// of the recurrence. The decision depends only on the sequence itself, so its bits do not depend on the sequences
// packed with it.
constexpr int64_t kFewTokens = 4;

// The recurrence does not keep the states between chunks.
inline int64_t few_tokens_of(const ChunkedRule<int64_t>& op) { return op.return_intermediate_states ? -1 : kFewTokens; }

void run_recurrence(const GatedDeltaRule<>& op, const StateIo& state_io, const Tensor& o);

// Processes only these sequences of the call. It copies their tokens.
void run_recurrence_of(const std::vector<int64_t>& sequences, const GatedDeltaRule<>& op, const StateIo& state_io,
                       const Tensor& o);

}  // namespace torch_gdn::cpu
