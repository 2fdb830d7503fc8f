#include "ops/gdn/chunk_fwd_o.h"

#include "metal/gdn/launches.h"
#include "metal/implement.h"
#include "shaders/gdn/chunk_fwd_o.h"
#include "shaders/gdn/chunk_threads.h"

namespace torch_gdn {

Launch launch_chunk_fwd_o(const ChunkFwdOCall& call) {
  const auto& [s, chunks, v_new, h, cu_seqlens, slots, v_first, scale, o] = call;
  const auto& [q, k, w, u, g_cumsum, log_decays, scores] = chunks;
  ChunkFwdOParameters parameters{};
  parameters.sequence = sequence_parameters(s, cu_seqlens);
  parameters.slots = slots.parameters;
  parameters.slots.has_flags = 0;  // the kernel reads h, never the pool
  parameters.q = row_strides(q);
  parameters.k = row_strides(k);
  parameters.o = row_strides(o);
  parameters.h = state_strides(h, v_first);
  parameters.heads = head_groups(s, q.size(2));
  parameters.value_heads = int32_t(s.HV);
  parameters.output_is_f32 = o.scalar_type() != q.scalar_type();
  parameters.scale = float(scale);
  const bool has_scores = scores.has_value();
  return {"gdn/chunk_fwd_o",
          {q.scalar_type(), h.scalar_type(), s.K, s.V, s.C, vector_width({q, k, v_new}),
           TemplateArgument::flag(has_scores)},
          {q, has_scores ? Binding() : Binding(k), v_new, h, has_scores ? scores : g_cumsum, cu_seqlens, slots.indices,
           o, Binding::error_log(), parameters},
          {s.NT, s.HV, s.B},
          chunk_threads(int(s.C))};
}

namespace {

void run(const ChunkFwdO<int64_t>& op, const Tensor& o) {
  launcher().run({launch_chunk_fwd_o(
      {.shape = op.shape,
       .chunks = {.q = unit_last_stride(op.q, "q"), .k = unit_last_stride(op.k, "k"), .g_cumsum = as_f32(op.g)},
       .v_new = as_contiguous(op.v, "v"),
       .h = as_contiguous(op.h, "h"),
       .cu_seqlens = index_array(op.q.device(), op.cu_seqlens),
       .slots = {},
       .v_first = op.state_v_first,
       .scale = scale_or_default(op.scale, op.shape.K),
       .o = o})});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<ChunkFwdO, &run>(m); }

}  // namespace torch_gdn
