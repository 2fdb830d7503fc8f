#include "ops/channel_gate.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softplus.h>

namespace torch_gdn {

Tensor channel_decays(const ChunkShape<>& s, const Tensor& g, const ChannelGateOptions& gate) {
  const auto& [use_gate, A_log, dt_bias, lower_bound] = gate;
  if (!use_gate) return g;
  Tensor x = g.to(at::kFloat);
  if (dt_bias.has_value()) x = x + dt_bias->to(at::kFloat).reshape({s.HV, s.K});
  const Tensor rates = A_log.has_value() ? A_log->to(at::kFloat).reshape({s.HV, 1}).exp() : Tensor();
  if (lower_bound.has_value()) return at::sigmoid(rates.defined() ? rates * x : x) * *lower_bound;
  return -rates * at::softplus(x);
}

}  // namespace torch_gdn
