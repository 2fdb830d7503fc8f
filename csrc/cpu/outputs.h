// Memory for what an op returns.
#pragma once
#include <ATen/ops/empty.h>

#include "ops/check.h"

namespace torch_gdn::cpu {

// at::empty, whose first touch is cheap where it is large: see outputs.cpp.
Tensor empty_output(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace torch_gdn::cpu
