#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "launches.h"

namespace torch_gdn {

namespace {

// The layout of a state that exists, else that of the one to be written: it decides how the kernel moves it.
bool value_is_inner(const optional<Tensor>& initial_state, bool state_v_first) {
  if (!initial_state.has_value()) return !state_v_first;
  const auto strides = state_strides(*initial_state, state_v_first);
  return strides.value <= strides.key;
}

struct Options {
  bool normalise, state_v_first;
  double scale;
};

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

Launch launch_fused_recurrent(const ChunkShape& shape, const Tensor& q, const Tensor& k, const Tensor& v,
                              const Gates& gates, const Channels& channels, const optional<Tensor>& initial_state,
                              const optional<Tensor>& bounds, const Options& options, const Tensor& o,
                              const Tensor& final_state) {
  RecurrentParameters parameters{};
  parameters.sequence = sequence_parameters(shape);
  parameters.q = row_strides(q);
  parameters.k = row_strides(k);
  parameters.v = row_strides(v);
  parameters.gates = gates.parameters;
  parameters.channels = channel_parameters(channels, gates);
  parameters.heads = head_groups(shape);
  parameters.value_heads = int32_t(shape.HV);
  parameters.value_size = int32_t(shape.V);
  parameters.is_wide = o.scalar_type() != q.scalar_type();
  parameters.scale = float(options.scale);
  if (initial_state.has_value()) {
    parameters.initial_state = state_strides(*initial_state, options.state_v_first);
    parameters.has_initial_state = 1;
  }
  if (final_state.defined()) {
    parameters.final_state = state_strides(final_state, options.state_v_first);
    parameters.has_final_state = 1;
  }
  const auto& channel = parameters.channels;
  const bool has_channels = channel.gk_type != kAbsent || channel.gv_type != kAbsent || channel.has_vector_beta;
  const auto spelled = [](bool value) { return value ? "true" : "false"; };
  return {"fused_recurrent_gated_delta_rule",
          "gdn/fused_recurrent_gated_delta_rule.metal",
          {metal_type(q.scalar_type()), std::to_string(shape.K),
           spelled(value_is_inner(initial_state, options.state_v_first)), spelled(options.normalise),
           spelled(has_channels)},
          {q, k, v, or_stand_in(gates.g, q), or_stand_in(gates.beta, q), or_stand_in(gates.A_log, q),
           or_stand_in(gates.dt_bias, q), or_stand_in(channels.gk, q), or_stand_in(channels.gv, q),
           or_stand_in(initial_state, q), or_stand_in(bounds, q), o, final_state.defined() ? final_state : o,
           Binding::error_log(), Binding::values(parameters)},
          {size_t(ceil_div(shape.V, 32)), size_t(shape.HV), size_t(shape.N)},
          128};
}

std::tuple<Tensor, Tensor> fused_recurrent_gated_delta_rule(
    const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& g, const optional<Tensor>& beta,
    optional<double> scale, const optional<Tensor>& initial_state, bool output_final_state,
    bool use_qk_l2norm_in_kernel, bool state_v_first, const optional<Tensor>& cu_seqlens, const optional<Tensor>& gk,
    const optional<Tensor>& gv, bool use_gate_in_kernel, const optional<Tensor>& A_log, const optional<Tensor>& dt_bias,
    bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, optional<at::ScalarType> output_dtype,
    std::string_view head_grouping) {
  const GateOptions gates{use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval};
  const Channels channels{gk, gv};
  const WholeOp op{"fused_recurrent_gated_delta_rule", q, k, v, g, beta, gates, output_dtype, head_grouping};
  const auto shape = check_fused_recurrent_gated_delta_rule(op, channels, initial_state, state_v_first, cu_seqlens);
  const auto nothing = at::empty({0}, q.options().dtype(at::kFloat));
  const auto o = at::empty({shape.B, shape.T, shape.HV, shape.V}, q.options().dtype(output_dtype_of(op)));
  if (shape.T == 0) {
    return {o, output_final_state ? copied_state(shape, q, initial_state, state_v_first) : nothing};
  }
  const auto final_state = output_final_state ? empty_state(shape, q, state_v_first) : Tensor();
  const Options options{use_qk_l2norm_in_kernel, state_v_first, scale_or_default(scale, shape.K)};
  launcher().run(
      {launch_fused_recurrent(shape, unit_last_stride(q, "q"), unit_last_stride(k, "k"), unit_last_stride(v, "v"),
                              gates_of(g, beta, gates), readable_channels(channels), state_as_f32(initial_state),
                              sequence_bounds(cu_seqlens, q.device()), options, o, final_state)});
  return {o, output_final_state ? final_state : nothing};
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { m.impl("fused_recurrent_gated_delta_rule", fused_recurrent_gated_delta_rule); }

}  // namespace torch_gdn
