#include "metal/kda/launches.h"

namespace torch_gdn {

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
          {in.q, in.k, in.v, *gates.g, *in.gates.beta, or_output(gates.A_log), or_output(gates.dt_bias),
           or_output(states.source), or_output(in.cu_seqlens), or_output(states.slots.indices),
           or_output(states.slots.flags), or_output(states.checkpoints.offsets), or_output(states.checkpoints.indices),
           o, states.target.defined() ? states.target : o, Binding::error_log(), Binding::values(parameters)},
          state_threadgroups(s),
          kStateThreads};
}

}  // namespace torch_gdn
