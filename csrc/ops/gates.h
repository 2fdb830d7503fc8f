#pragma once
#include "ops/check.h"
#include "ops/chunk_shape.h"

namespace torch_gdn {

// Turns raw gates into final ones: g = -exp(A_log) softplus(g + dt_bias), and beta = sigmoid(beta) or twice that.
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

// Turns raw g of key channels into final g:
//     -exp(A_log) softplus(g + dt_bias)  or  lower_bound sigmoid(exp(A_log) (g + dt_bias))
struct ChannelGateOptions {
  bool use_gate = false;            // if false, the other members are not read
  optional<Tensor> A_log, dt_bias;  // HV and HV * K values of any shape; an absent one counts as zeros
  optional<double> lower_bound;
};

template <typename Int>
void check_values(const Check<Int>& check, const char* argument, const optional<Tensor>& x, const char* pattern,
                  const Int& count) {
  if (!x.has_value()) return;
  check.is_floating(argument, *x);
  const bool fits = holds(sym_eq(x->sym_numel(), c10::SymInt(count)));
  TORCH_CHECK_VALUE(fits, check.op(), ": ", argument, ": expected ", pattern, " = ", count, " values, got ",
                    sizes_of<Int>(*x));
  check.on_device(argument, *x);
}

template <typename Int>
void check_channel_gate(const Check<Int>& check, const Int& HV, const Int& K, const ChannelGateOptions& gate) {
  const auto& bound = gate.lower_bound;
  check_values(check, "A_log", gate.A_log, "HV", HV);
  check_values(check, "dt_bias", gate.dt_bias, "HV * K", Int(HV * K));
  check.value(!bound.has_value() || *bound < 0, "lower_bound", "None or a number below 0", bound.value_or(0));
}

// Checks the gate of a rule that computes g if use_gate is set.
template <typename Int>
void check_channel_gate_in_kernel(const Check<Int>& check, const ChunkShape<Int>& s, const ChannelGateOptions& gate) {
  if (!gate.use_gate) return;
  check.value(gate.A_log.has_value() || gate.lower_bound.has_value(), "A_log",
              "a tensor when use_gate_in_kernel is set without lower_bound", "None");
  check_channel_gate(check, s.HV, s.K, gate);
}

}  // namespace torch_gdn
