// Binds g and beta with any strides and float dtype, final or raw.
#pragma once
#include "metal/parameters.h"
#include "ops/gates.h"
#include "shaders/core/parameters.h"

namespace torch_gdn {

struct Gates {
  optional<Tensor> g, beta, A_log, dt_bias;
  GateParameters parameters{};
};

// Converts float64 and 8-bit dtypes.
Tensor readable(const Tensor& x);
int32_t element_type(const optional<Tensor>& x);

Gates gates_of(const optional<Tensor>& g, const optional<Tensor>& beta, const GateOptions& options);

// Binds g [B, T, HV, K], which has one value per channel, final or raw.
struct ChannelGates {
  optional<Tensor> g, A_log, dt_bias;
  ChannelGateParameters parameters{};

  bool has_gate() const { return parameters.kind != kFinalGate; }
};

ChannelGates channel_gates_of(const optional<Tensor>& g, const char* name, const ChannelGateOptions& options);

}  // namespace torch_gdn
