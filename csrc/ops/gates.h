// Turns raw gates into final ones: g = -exp(A_log) softplus(g + dt_bias), and beta = sigmoid(beta) or twice that.
#pragma once
#include "ops/check.h"

namespace torch_gdn {

struct GateOptions {
  bool use_gate = false;
  optional<Tensor> A_log, dt_bias;  // read if use_gate is set
  bool use_beta_sigmoid = false;
  bool allow_neg_eigval = false;

  auto arguments() { return std::tie(use_gate, A_log, dt_bias, use_beta_sigmoid, allow_neg_eigval); }
};

template <typename Int>
void check_gates(const Check<Int>& check, const Int& HV, const optional<Tensor>& g, const optional<Tensor>& beta,
                 const GateOptions& gates) {
  const char* with_gate = "a tensor when use_gate_in_kernel is set";
  check.value(!gates.use_gate || g.has_value(), "g", with_gate, "None");
  check.value(!gates.use_gate || gates.A_log.has_value(), "A_log", with_gate, "None");
  check.value(!gates.use_beta_sigmoid || beta.has_value(), "beta", "a tensor when use_beta_sigmoid_in_kernel is set",
              "None");
  check.value(!gates.allow_neg_eigval || gates.use_beta_sigmoid, "allow_neg_eigval",
              "False when use_beta_sigmoid_in_kernel is False", "True");
  if (!gates.use_gate) return;
  check.is_floating("A_log", *gates.A_log).shape("[HV]", {HV});
  if (!gates.dt_bias.has_value()) return;
  check.is_floating("dt_bias", *gates.dt_bias).shape("[HV]", {HV});
}

}  // namespace torch_gdn
