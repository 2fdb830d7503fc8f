#pragma once
#include "launch/prefill.h"
#include "ops/gdn/chunk_gated_delta_rule.h"

namespace torch_gdn {

// Chooses the algorithm for sequences of these sizes on this device.
PrefillChoice choose_prefill(const ChunkedRule<int64_t>& op);

}  // namespace torch_gdn
