#include "ops/gdn/chunk_fwd_h.h"

#include "metal/gdn/launches.h"
#include "metal/implement.h"
#include "shaders/gdn/chunk_fwd_h.h"

namespace torch_gdn {

Launch launch_chunk_fwd_h(const ChunkFwdHCall& call) {
  const auto& [s, chunks, cu_seqlens, states, h, v_new] = call;
  const auto& [q, k, w, u, g_cumsum, log_decays, scores] = chunks;
  ChunkFwdHParameters parameters{};
  parameters.sequence = sequence_parameters(s, cu_seqlens);
  parameters.k = row_strides(k);
  parameters.h = state_strides(h, states.v_first);
  parameters.heads = head_groups(s, k.size(2));
  parameters.value_heads = int32_t(s.HV);
  states.set(parameters);
  return {"gdn/chunk_fwd_h",
          {k.scalar_type(), w.scalar_type(), s.K, s.V, s.C, vector_width({k, w, u}), states.dtype(),
           TemplateArgument::flag(log_decays.has_value())},
          {k, w, u, log_decays.has_value() ? log_decays : g_cumsum, states.bindings(cu_seqlens, parameters, h, v_new)},
          state_threadgroups(s),
          kStateThreads};
}

namespace {

void run(const ChunkFwdH<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto& [h, v_new, final_state] = outputs;
  if (op.shape.T == 0) {
    h.zero_();
    copy_state(op.initial_state, final_state);
    return;
  }
  launcher().run({launch_chunk_fwd_h({.shape = op.shape,
                                      .chunks = {.k = unit_last_stride(op.k, "k"),
                                                 .w = as_contiguous(op.w, "w"),
                                                 .u = as_contiguous(op.u, "u"),
                                                 .g_cumsum = as_f32(op.g)},
                                      .cu_seqlens = index_array(op.k.device(), op.cu_seqlens),
                                      .states = state_io(op.initial_state, final_state, op.state_v_first),
                                      .h = h,
                                      .v_new = v_new})});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<ChunkFwdH, &run>(m); }

}  // namespace torch_gdn
