#pragma once
#include <optional>

#include "launch/launch.h"

namespace torch_gdn {

// x is [B, T, H, D] with a last stride of 1. y has as many elements and is contiguous. rstd has one float32 per row and
// is contiguous.
Launch launch_l2norm(const at::Tensor& x, double eps, const at::Tensor& y,
                     const std::optional<at::Tensor>& rstd = std::nullopt);

}  // namespace torch_gdn
