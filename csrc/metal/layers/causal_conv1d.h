// The convolution's in-place launch, for an op that has another one behind it.
#pragma once
#include "metal/slots.h"
#include "ops/layers/causal_conv1d.h"
#include "shaders/layers/convolution.h"

namespace torch_gdn {

// One launch, whatever the number of tokens. The arguments are checked. `order`: where x has its channels.
Launch launch_causal_conv1d_update(const CausalConv1dUpdate<int64_t>& op, const Slots& slots, const ChannelOrder& order,
                                   const Tensor& y);

}  // namespace torch_gdn
