// The kernels of this family that ops of other families also call. The caller must have checked the arguments.
#pragma once
#include "ops/layers/causal_conv1d.h"
#include "ops/layers/rows.h"

namespace torch_gdn::cpu {

void causal_conv1d_update(const CausalConv1dUpdate<int64_t>& op, const Tensor& y);
void rms_norm_gated(const RmsNormGated<int64_t>& op, const Tensor& y);

}  // namespace torch_gdn::cpu
