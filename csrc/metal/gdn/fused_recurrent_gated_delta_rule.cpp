#include "metal/gdn/rule.h"
#include "metal/implement.h"
#include "ops/gdn/rules.h"
#include "shaders/gdn/parameters.h"

namespace torch_gdn {

namespace {

// Returns whether each sequence has one token and at most one slot, and all tensors have one dtype. Such calls have a
// kernel of their own.
bool is_one_token(const RuleInputs& in, const StateIo& states, const Tensor& o) {
  return in.shape.T == 1 && !in.cu_seqlens.has_value() && states.slots.parameters.columns == 0 &&
         states.checkpoints.parameters.multiple == 0 && in.v.scalar_type() == in.q.scalar_type() &&
         o.scalar_type() == in.q.scalar_type();
}

Launch launch_token(const RuleInputs& in, const StateIo& states, const Tensor& o,
                    const FusedRecurrentParameters& parameters) {
  return {"gdn/fused_recurrent_gated_delta_rule_token",
          {in.q.scalar_type(), in.shape.K, states.value_is_inner(), in.normalise, states.dtype()},
          {in.q, in.k, in.v, in.gates.g, in.gates.beta, in.gates.A_log, in.gates.dt_bias,
           states.slots.source(states.source), states.slots.indices, states.slots.flags, o, states.target,
           Binding::error_log(), parameters},
          state_threadgroups(in.shape),
          recurrent_threads(int(in.shape.K))};
}

}  // namespace

Launch launch_fused_recurrent_gated_delta_rule(const RuleInputs& in, const StateIo& states, const Tensor& o) {
  const auto& [gk, gv] = std::tie(in.gk, in.gv);
  auto parameters = in.parameters<FusedRecurrentParameters>(states, o);
  auto& channel = parameters.channels;
  channel.gk = gk.parameters;
  channel.gv = gv.parameters;
  channel.has_vector_beta = in.gates.beta.has_value() && in.gates.beta->dim() == 4;
  parameters.v_type = element_type(in.v);
  parameters.o_type = element_type(o);
  const bool inner = states.value_is_inner();
  if (states.source.has_value()) {
    parameters.initial_has_vectors = has_vector_states(*states.source, states.v_first, inner);
  }
  if (states.target.defined()) parameters.final_has_vectors = has_vector_states(states.target, states.v_first, inner);
  const bool has_channels = gk.g.has_value() || gv.g.has_value() || channel.has_vector_beta;
  if (!has_channels && is_one_token(in, states, o)) return launch_token(in, states, o, parameters);
  return {"gdn/fused_recurrent_gated_delta_rule",
          {in.q.scalar_type(), in.shape.K, inner, in.normalise, has_channels, states.dtype()},
          {in.q, in.k, in.v, in.gates.g, in.gates.beta, gk.has_gate() ? gk.A_log : in.gates.A_log,
           gk.has_gate() ? gk.dt_bias : in.gates.dt_bias, gk.g, gv.g, states.slots.accepted,
           states.bindings(in.cu_seqlens, parameters, o)},
          state_threadgroups(in.shape),
          recurrent_threads(int(in.shape.K))};
}

namespace {

void run(const RecurrentCall<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [o, final_state] = outputs;
  if (op.shape.T == 0) return copy_state(op.initial_state, final_state);
  launcher().run({launch_fused_recurrent_gated_delta_rule(
      rule_inputs(op), state_io(op.initial_state, final_state, op.state_v_first), o)});
}

void run_in_place(const RecurrentCallInPlace<int64_t>& op, const Tensor& o) {
  launcher().run({launch_fused_recurrent_gated_delta_rule(
      rule_inputs(op), state_io(op.q.device(), op.pool, op.state_v_first), op.out.value_or(o))});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  metal::implement<FusedRecurrentGatedDeltaRule, &run>(m);
  metal::implement<FusedRecurrentGatedDeltaRuleInPlace, &run_in_place>(m);
  metal::implement<FusedRecurrentKda, &run>(m);
  metal::implement<FusedRecurrentKdaInPlace, &run_in_place>(m);
}

}  // namespace torch_gdn
