// The recurrence token by token, for both end-to-end ops: the chunked one hands it sequences of a few tokens.
#pragma once
#include "cpu/common.h"
#include "ops/gdn/gated_delta_rule.h"

namespace torch_gdn::cpu {

void run_recurrence(const GatedDeltaRule<>& op, const ChannelDecays& channels, const StateIo& state_io,
                    const Tensor& o);

}  // namespace torch_gdn::cpu
