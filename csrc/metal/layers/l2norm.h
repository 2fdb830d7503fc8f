#pragma once
#include "launch/launch.h"

namespace torch_gdn {

// x: [B, T, H, D] with a last stride of 1; y: as many elements, contiguous.
Launch launch_l2norm(const at::Tensor& x, double eps, const at::Tensor& y);

}  // namespace torch_gdn
