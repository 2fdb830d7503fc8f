// Adds up partial sums [rows, elements, columns], f32, in a fixed order.
#pragma once
#include "metal/parameters.h"

namespace torch_gdn {

Tensor partial_sums(const Tensor& like, int64_t rows, int64_t columns);
Launch launch_sum_partials(const Tensor& partials, const Tensor& result);

}  // namespace torch_gdn
