#include "metal/gates.h"

namespace torch_gdn {

namespace {

optional<Tensor> readable_or_none(const optional<Tensor>& x) { return x.has_value() ? readable(*x) : x; }

// The tensor has one number per value head or channel, so the copy is small.
optional<Tensor> table(const optional<Tensor>& x) { return contiguous(readable_or_none(x)); }

}  // namespace

Tensor readable(const Tensor& x) {
  const auto dtype = x.scalar_type();
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 ? x : x.to(at::kFloat);
}

int32_t element_type(const optional<Tensor>& x) {
  if (!x.has_value()) return kAbsent;
  return x->scalar_type() == at::kFloat ? kFloat32 : x->scalar_type() == at::kHalf ? kFloat16 : kBfloat16;
}

Gates gates_of(const optional<Tensor>& g, const optional<Tensor>& beta, const GateOptions& options) {
  Gates gates{.g = readable_or_none(g), .beta = readable_or_none(beta)};
  if (options.use_gate) {
    gates.A_log = table(options.A_log);
    gates.dt_bias = table(options.dt_bias);
  }
  auto& parameters = gates.parameters;
  if (gates.g.has_value()) parameters.g = row_strides(*gates.g);
  if (gates.beta.has_value()) {
    if (gates.beta->dim() == 4) gates.beta = unit_last_stride(*gates.beta, "beta");
    parameters.beta = row_strides(*gates.beta);
  }
  parameters.g_type = element_type(gates.g);
  parameters.beta_type = element_type(gates.beta);
  parameters.A_log_type = element_type(gates.A_log);
  parameters.dt_bias_type = element_type(gates.dt_bias);
  if (options.use_beta_sigmoid) parameters.beta_scale = options.allow_neg_eigval ? 2.0f : 1.0f;
  return gates;
}

ChannelGates channel_gates_of(const optional<Tensor>& g, const char* name, const ChannelGateOptions& options) {
  ChannelGates gates;
  if (!g.has_value()) return gates;
  gates.g = unit_last_stride(readable(*g), name);
  auto& parameters = gates.parameters;
  parameters.g = row_strides(*gates.g);
  parameters.g_type = element_type(gates.g);
  parameters.kind = kFinalGate;
  if (!options.use_gate) return gates;
  gates.A_log = table(options.A_log);
  gates.dt_bias = table(options.dt_bias);
  parameters.kind = options.lower_bound.has_value() ? kBoundedGate : kSoftplusGate;
  parameters.A_log_type = element_type(gates.A_log);
  parameters.dt_bias_type = element_type(gates.dt_bias);
  parameters.lower_bound = float(options.lower_bound.value_or(0));
  return gates;
}

}  // namespace torch_gdn
