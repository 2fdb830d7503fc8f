// Launches the equivalent of FLA's chunk_gated_delta_rule_fwd_intra, together with the cumulative sum before it. It is
// not an op, because FLA's function takes the sum and returns A for its backward pass.
#include "shaders/gdn/chunk_fwd_intra.h"

#include "metal/gdn/launches.h"
#include "shaders/gdn/chunk_threads.h"

namespace torch_gdn {

Launch launch_chunk_fwd_intra(const RuleInputs& in, const Chunks& chunks) {
  const auto& s = in.shape;
  const auto& [g, beta, A_log, dt_bias, gates] = in.gates;
  // The value heads of a key head share k k^T, unless that would leave cores without work.
  const bool share = s.NT * s.H * s.B >= busy_threadgroups();
  const int64_t members = share ? s.HV / s.H : 1;
  const ChunkFwdIntraParameters parameters{.sequence = sequence_parameters(s, in.cu_seqlens),
                                           .gates = gates,
                                           .k = row_strides(in.k),
                                           .v = row_strides(in.v),
                                           .heads = head_groups(s),
                                           .value_heads = int32_t(s.HV),
                                           .members = int32_t(members)};
  return {"gdn/chunk_fwd_intra",
          {in.k.scalar_type(), chunks.w.scalar_type(), s.K, s.V, s.C, vector_width({in.k, in.v})},
          {in.k, in.v, *g, *beta, A_log, dt_bias, in.cu_seqlens, chunks.g_cumsum, chunks.w, chunks.u,
           Binding::error_log(), parameters},
          {s.NT, s.HV / members, s.B},
          chunk_threads(int(s.C))};
}

}  // namespace torch_gdn
