#include "shaders/kda/fused_chunk_kda.h"

#include "launch/prefill.h"
#include "metal/gdn/launches.h"

namespace torch_gdn {

Launch launch_fused_chunk_kda(const RuleInputs& in, int64_t chunk_size, const StateIo& states, const Tensor& o) {
  const auto& s = in.shape;
  FusedChunkKdaParameters parameters{.rule = in.parameters<FusedChunkParameters>(states, o), .gate = in.gk.parameters};
  parameters.rule.has_norm = in.normalise;
  parameters.rule.output_is_f32 = o.scalar_type() != in.q.scalar_type();
  return {"kda/fused_chunk_kda",
          {in.q.scalar_type(), s.K, fused_kda_chunk_size(s.K, chunk_size), vector_width({in.q, in.k}), states.dtype()},
          {in.q, in.k, in.v, in.gk.g, in.gates.beta, in.gk.A_log, in.gk.dt_bias,
           states.bindings(in.cu_seqlens, parameters, o)},
          state_threadgroups(s),
          kStateThreads};
}

}  // namespace torch_gdn
