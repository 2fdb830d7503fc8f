#pragma once
#include "ops/gates.h"
#include "ops/op.h"

namespace torch_gdn {

// The gate of Kimi Delta Attention as an op of its own. g is [..., HV, K]. The result is computed in float32 and
// rounded once.
template <typename Int>
struct FusedKdaGate {
  static constexpr const char* kSchema =
      "fused_kda_gate(Tensor g, Tensor? A_log=None, Tensor? dt_bias=None, float? lower_bound=None, "
      "ScalarType? output_dtype=None) -> Tensor";

  Tensor g;
  ChannelGateOptions gate{.use_gate = true};
  optional<at::ScalarType> output_dtype;

  Int HV = 0, K = 0;

  auto arguments() { return std::tie(g, gate.A_log, gate.dt_bias, gate.lower_bound, output_dtype); }

  void check(const char* op) {
    const Check<Int> check(op, "g", g);
    check.is_floating("g", g);
    check.value(g.dim() >= 2, "g", "shape [..., HV, K]", sizes_of<Int>(g));
    HV = size_of<Int>(g, -2), K = size_of<Int>(g, -1);
    check_channel_gate(check, HV, K, gate);
    check.is_activation("output_dtype", dtype_of_output());
  }

  at::ScalarType dtype_of_output() const { return output_dtype.value_or(at::kFloat); }

  Tensor outputs() const { return empty(sizes_of<Int>(g), g.options().dtype(dtype_of_output())); }
};

// The gradients of fused_kda_gate. g is [..., HV, K]. Those of A_log [HV] and dt_bias [HV * K] are float32.
template <typename Int>
struct FusedKdaGateBwd {
  static constexpr const char* kSchema =
      "fused_kda_gate_bwd(Tensor dy, Tensor g, Tensor? A_log=None, Tensor? dt_bias=None, float? lower_bound=None) -> "
      "(Tensor dg, Tensor dA_log, Tensor ddt_bias)";

  Tensor dy, g;
  ChannelGateOptions gate{.use_gate = true};

  Int HV = 0, K = 0;

  auto arguments() { return std::tie(dy, g, gate.A_log, gate.dt_bias, gate.lower_bound); }

  void check(const char* op) {
    const Check<Int> check(op, "dy", dy);
    check.is_activation("dy", dy);
    check.value(dy.dim() >= 2, "dy", "shape [..., HV, K]", sizes_of<Int>(dy));
    check.is_activation("g", g);
    check.same_shape("g", g, "dy", dy);
    HV = size_of<Int>(g, -2), K = size_of<Int>(g, -1);
    check_channel_gate(check, HV, K, gate);
  }

  std::tuple<Tensor, Tensor, Tensor> outputs() const {
    const auto float32 = g.options().dtype(at::kFloat);
    return {empty(sizes_of<Int>(g), g.options()), empty_if<Int>(gate.A_log.has_value(), {HV}, float32),
            empty_if<Int>(gate.dt_bias.has_value(), {HV * K}, float32)};
  }
};

}  // namespace torch_gdn
