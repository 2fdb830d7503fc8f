// The convolution's in-place launch, for an op that launches another kernel after it.
#pragma once
#include "metal/slots.h"
#include "ops/layers/causal_conv1d.h"
#include "shaders/layers/convolution.h"

namespace torch_gdn {

// Returns one launch, whatever the number of tokens. The arguments must be checked. `order` says how x orders its
// channels.
Launch launch_causal_conv1d_update(const CausalConv1dUpdate<int64_t>& op, const Slots& slots, const ChannelOrder& order,
                                   const Tensor& y);

}  // namespace torch_gdn
