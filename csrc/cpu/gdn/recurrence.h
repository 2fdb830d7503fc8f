// The recurrence token by token on the CPU, for both end-to-end ops: the chunked one hands it sequences of a few
// tokens.
#pragma once
#include "cpu/common.h"

namespace torch_gdn::cpu {

// o [B, T, HV, V]; states go from and to their state_io.
Tensor run_recurrence(const ChunkShape<>& s, const EndToEndOp& op, const Channels& channels, const StateIo& state_io,
                      const optional<Tensor>& cu_seqlens, bool normalise, optional<double> scale);

}  // namespace torch_gdn::cpu
