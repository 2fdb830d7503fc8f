#include "shaders/gdn/fused_chunk_gated_delta_rule.h"

#include "launch/prefill.h"
#include "metal/gdn/launches.h"

namespace torch_gdn {

Launch launch_fused_chunk_gated_delta_rule(const RuleInputs& in, int64_t chunk_size, const StateIo& states,
                                           const Tensor& o) {
  const auto& s = in.shape;
  auto parameters = in.parameters<FusedChunkParameters>(states, o);
  parameters.has_norm = in.normalise;
  parameters.output_is_f32 = o.scalar_type() != in.q.scalar_type();
  return {"gdn/fused_chunk_gated_delta_rule",
          {in.q.scalar_type(), s.K, fused_chunk_size(s.K, int64_t(in.q.element_size()), chunk_size),
           vector_width({in.q, in.k}), states.dtype()},
          {in.q, in.k, in.v, in.gates.g, in.gates.beta, in.gates.A_log, in.gates.dt_bias,
           states.bindings(in.cu_seqlens, parameters, o)},
          state_threadgroups(s),
          kStateThreads};
}

}  // namespace torch_gdn
