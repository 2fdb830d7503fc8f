// The in-place launch of the convolution, for an op that launches another kernel after it.
#pragma once
#include "metal/slots.h"
#include "ops/layers/causal_conv1d.h"
#include "shaders/layers/convolution.h"

namespace torch_gdn {

// Returns one launch for any number of tokens. The caller must have checked the arguments. `order` says how x orders
// its channels.
Launch launch_causal_conv1d_update(const CausalConv1dUpdate<int64_t>& op, const Slots& slots, const ChannelOrder& order,
                                   const Tensor& y);

}  // namespace torch_gdn
