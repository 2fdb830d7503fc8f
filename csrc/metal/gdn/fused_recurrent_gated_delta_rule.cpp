#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "metal/gdn/rule.h"

namespace torch_gdn {

namespace {

// The layout of a state that exists, else that of the one to be written: it decides how the kernel moves it.
bool value_is_inner(const optional<Tensor>& source, bool state_v_first) {
  if (!source.has_value()) return !state_v_first;
  const auto strides = state_strides(*source, state_v_first);
  return strides.value <= strides.key;
}

// 4 keys of a value lie together, from a multiple of 4 elements on.
bool has_key_vectors(const Tensor& state, bool state_v_first) {
  return state_strides(state, state_v_first).key == 1 && vector_width({state_v_first ? state : state.mT()}) == "4";
}

Channels readable_channels(const Channels& channels) {
  Channels result;
  if (channels.gk.has_value()) result.gk = unit_last_stride(readable(*channels.gk), "gk");
  if (channels.gv.has_value()) result.gv = unit_last_stride(readable(*channels.gv), "gv");
  return result;
}

ChannelParameters channel_parameters(const Channels& channels, const Gates& gates) {
  ChannelParameters parameters{};
  if (channels.gk.has_value()) parameters.gk = row_strides(*channels.gk);
  if (channels.gv.has_value()) parameters.gv = row_strides(*channels.gv);
  parameters.gk_type = element_type(channels.gk);
  parameters.gv_type = element_type(channels.gv);
  parameters.has_vector_beta = gates.beta.has_value() && gates.beta->dim() == 4;
  return parameters;
}

}  // namespace

Launch launch_fused_recurrent_gated_delta_rule(const ChunkShape<>& shape, const Tensor& q, const Tensor& k,
                                               const Tensor& v, const Gates& gates, const Channels& channels,
                                               const StateIo& states, const optional<Tensor>& cu_seqlens,
                                               const RuleOptions& options, const Tensor& o) {
  auto parameters = rule_parameters<FusedRecurrentParameters>(shape, q, k, v, gates, states, options, o);
  parameters.channels = channel_parameters(channels, gates);
  if (states.source.has_value()) {
    parameters.initial_has_vectors = has_key_vectors(*states.source, options.state_v_first);
  }
  if (states.target.defined()) parameters.final_has_vectors = has_key_vectors(states.target, options.state_v_first);
  const auto& channel = parameters.channels;
  const bool has_channels = channel.gk_type != kAbsent || channel.gv_type != kAbsent || channel.has_vector_beta;
  // Without a token only a pool is written to, and is bound where nothing is read.
  const auto bound = [&](const Tensor& x) { return x.numel() > 0 ? x : or_dummy({}, states.target); };
  const auto or_bound = [&](const optional<Tensor>& x) { return bound(x.value_or(o)); };
  const auto spelled = [](bool value) { return value ? "true" : "false"; };
  return {"fused_recurrent_gated_delta_rule",
          "gdn/fused_recurrent_gated_delta_rule.metal",
          {metal_type(q.scalar_type()), std::to_string(shape.K),
           spelled(value_is_inner(states.source, options.state_v_first)), spelled(options.normalise),
           spelled(has_channels), metal_type(states.dtype())},
          {bound(q), bound(k), bound(v), or_bound(gates.g), or_bound(gates.beta), or_bound(gates.A_log),
           or_bound(gates.dt_bias), or_bound(channels.gk), or_bound(channels.gv), or_bound(states.source),
           or_bound(cu_seqlens), or_bound(states.slots.indices), or_bound(states.slots.flags), bound(o),
           states.target.defined() ? states.target : o, Binding::error_log(), Binding::values(parameters)},
          rule_threadgroups(shape),
          128};
}

namespace {

std::tuple<Tensor, Tensor> fused_recurrent_gated_delta_rule(
    const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& g, const optional<Tensor>& beta,
    optional<double> scale, const optional<Tensor>& initial_state, bool output_final_state,
    bool use_qk_l2norm_in_kernel, bool state_v_first, const optional<Tensor>& cu_seqlens, const optional<Tensor>& gk,
    const optional<Tensor>& gv, bool use_gate_in_kernel, const optional<Tensor>& A_log, const optional<Tensor>& dt_bias,
    bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, optional<at::ScalarType> output_dtype,
    std::string_view head_grouping) {
  const GateOptions gates{use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval};
  const Channels channels{gk, gv};
  const EndToEndOp op{"fused_recurrent_gated_delta_rule", q, k, v, g, beta, gates, output_dtype, head_grouping};
  const auto shape = check_fused_recurrent_gated_delta_rule(op, channels, initial_state, state_v_first, cu_seqlens);
  const auto nothing = at::empty({0}, q.options().dtype(at::kFloat));
  const auto o = at::empty({shape.B, shape.T, shape.HV, shape.V}, q.options().dtype(output_dtype_of(op)));
  if (shape.T == 0) {
    return {o, output_final_state ? copied_state(shape, q, initial_state, state_v_first) : nothing};
  }
  const auto final_state = output_final_state ? empty_state(shape, q, state_v_first) : Tensor();
  const RuleOptions options{use_qk_l2norm_in_kernel, state_v_first, scale_or_default(scale, shape.K)};
  const StateIo states{.source = state_as_f32(initial_state), .target = final_state, .slots = {}};
  launcher().run({launch_fused_recurrent_gated_delta_rule(
      shape, unit_last_stride(q, "q"), unit_last_stride(k, "k"), unit_last_stride(v, "v"), gates_of(g, beta, gates),
      readable_channels(channels), states, cu_seqlens_on(q.device(), cu_seqlens), options, o)});
  return {o, output_final_state ? final_state : nothing};
}

Tensor fused_recurrent_gated_delta_rule_(
    const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& g, const optional<Tensor>& beta,
    const Tensor& state_pool, const optional<Tensor>& state_indices, const optional<Tensor>& has_initial_state,
    int64_t null_index, optional<double> scale, bool use_qk_l2norm_in_kernel, bool state_v_first,
    const optional<Tensor>& cu_seqlens, const optional<Tensor>& gk, const optional<Tensor>& gv, bool use_gate_in_kernel,
    const optional<Tensor>& A_log, const optional<Tensor>& dt_bias, bool use_beta_sigmoid_in_kernel,
    bool allow_neg_eigval, optional<at::ScalarType> output_dtype, std::string_view head_grouping) {
  const GateOptions gates{use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval};
  const Channels channels{gk, gv};
  const Pool pool{state_pool, state_indices, has_initial_state, null_index, state_v_first};
  const EndToEndOp op{"fused_recurrent_gated_delta_rule_", q, k, v, g, beta, gates, output_dtype, head_grouping};
  const auto shape = check_fused_recurrent_gated_delta_rule_(op, channels, pool, cu_seqlens);
  const auto o = at::empty({shape.B, shape.T, shape.HV, shape.V}, q.options().dtype(output_dtype_of(op)));
  const RuleOptions options{use_qk_l2norm_in_kernel, state_v_first, scale_or_default(scale, shape.K)};
  launcher().run({launch_fused_recurrent_gated_delta_rule(
      shape, unit_last_stride(q, "q"), unit_last_stride(k, "k"), unit_last_stride(v, "v"), gates_of(g, beta, gates),
      readable_channels(channels), in_place(q.device(), pool), cu_seqlens_on(q.device(), cu_seqlens), options, o)});
  return o;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  m.impl("fused_recurrent_gated_delta_rule", fused_recurrent_gated_delta_rule);
  m.impl("fused_recurrent_gated_delta_rule_", fused_recurrent_gated_delta_rule_);
}

}  // namespace torch_gdn
