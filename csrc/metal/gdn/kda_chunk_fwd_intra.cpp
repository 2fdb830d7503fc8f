#include "shaders/kda/kda_chunk_fwd_intra.h"

#include "metal/gdn/launches.h"
#include "shaders/gdn/chunk_threads.h"

namespace torch_gdn {

Launch launch_kda_chunk_fwd_intra(const RuleInputs& in, const Chunks& chunks) {
  const auto& s = in.shape;
  const auto& [decayed_q, decayed_k, w, u, g_cumsum, log_decays, scores] = chunks;
  const KdaChunkFwdIntraParameters parameters{.sequence = sequence_parameters(s, in.cu_seqlens),
                                              .gates = in.gates.parameters,
                                              .channel_gate = in.gk.parameters,
                                              .q = row_strides(in.q),
                                              .k = row_strides(in.k),
                                              .v = row_strides(in.v),
                                              .heads = head_groups(s),
                                              .value_heads = int32_t(s.HV)};
  return {"kda/kda_chunk_fwd_intra",
          {in.q.scalar_type(), w.scalar_type(), s.K, s.V, s.C, vector_width({in.v, w, u})},
          {in.q, in.k, in.v, in.gk.g, in.gates.beta, in.gk.A_log, in.gk.dt_bias, in.cu_seqlens, decayed_q, decayed_k,
           scores, log_decays, w, u, Binding::error_log(), parameters},
          {s.NT, s.HV, s.B},
          chunk_threads(int(s.C))};
}

}  // namespace torch_gdn
