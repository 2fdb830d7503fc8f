// Log decays and betas as the CPU kernels read them: contiguous f32, made from what the caller has.
#pragma once
#include "cpu/common.h"
#include "ops/gates.h"

namespace torch_gdn::cpu {

// [B, T, HV]: g itself, -exp(A_log) softplus(g + dt_bias), or zeros.
Tensor log_decays_of(const ChunkShape<>& s, const optional<Tensor>& g, const GateOptions& options);

// Of beta's shape: beta itself, its sigmoid or twice that; or ones [B, T, HV].
Tensor betas_of(const ChunkShape<>& s, const optional<Tensor>& beta, const GateOptions& options);

}  // namespace torch_gdn::cpu
