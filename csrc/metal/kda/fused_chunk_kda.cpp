#include "metal/kda/launches.h"

namespace torch_gdn {

ChannelGates channel_gates_of(const Tensor& g, const ChannelGateOptions& options) {
  ChannelGates gates{.g = unit_last_stride(readable(g), "g"), .A_log = std::nullopt, .dt_bias = std::nullopt};
  auto& parameters = gates.parameters;
  parameters.g = row_strides(gates.g);
  parameters.g_type = element_type(gates.g);
  parameters.kind = kFinalGate;
  if (!options.use_gate) return gates;
  if (options.A_log.has_value()) gates.A_log = readable(*options.A_log).contiguous();
  if (options.dt_bias.has_value()) gates.dt_bias = readable(*options.dt_bias).contiguous();
  parameters.kind = options.lower_bound.has_value() ? kBoundedGate : kSoftplusGate;
  parameters.A_log_type = element_type(gates.A_log);
  parameters.dt_bias_type = element_type(gates.dt_bias);
  parameters.lower_bound = float(options.lower_bound.value_or(0));
  return gates;
}

Launch launch_fused_chunk_kda(const RuleInputs& in, const ChannelGates& gates, int64_t chunk_size,
                              const StateIo& states, const Tensor& o) {
  const auto& s = in.shape;
  FusedChunkKdaParameters parameters{.rule = in.parameters<FusedChunkParameters>(states, o), .gate = gates.parameters};
  parameters.rule.has_norm = in.normalise;
  parameters.rule.output_is_f32 = o.scalar_type() != in.q.scalar_type();
  const auto or_output = [&](const optional<Tensor>& x) { return or_dummy(x, o); };
  return {"fused_chunk_kda",
          "kda/fused_chunk_kda.metal",
          {in.q.scalar_type(), s.K, fused_kda_chunk_size(s.K, chunk_size), vector_width({in.q, in.k}), states.dtype()},
          {in.q, in.k, in.v, gates.g, *in.gates.beta, or_output(gates.A_log), or_output(gates.dt_bias),
           or_output(states.source), or_output(in.cu_seqlens), or_output(states.slots.indices),
           or_output(states.slots.flags), or_output(states.checkpoints.offsets), or_output(states.checkpoints.indices),
           o, states.target.defined() ? states.target : o, Binding::error_log(), Binding::values(parameters)},
          state_threadgroups(s),
          kStateThreads};
}

}  // namespace torch_gdn
