#pragma once
#include "ops/check.h"

namespace torch_gdn::cpu {

// Makes the first access to a large output cheap.
void prepare_output(const Tensor& output);

}  // namespace torch_gdn::cpu
