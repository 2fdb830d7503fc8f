// g and beta of any strides and float dtype, final or raw.
#pragma once
#include "metal/parameters.h"
#include "ops/gates.h"

namespace torch_gdn {

struct Gates {
  optional<Tensor> g, beta, A_log, dt_bias;
  GateParameters parameters{};
};

// float64 and 8-bit dtypes are converted.
Tensor readable(const Tensor& x);
int32_t element_type(const optional<Tensor>& x);

Gates gates_of(const optional<Tensor>& g, const optional<Tensor>& beta, const GateOptions& options);

}  // namespace torch_gdn
