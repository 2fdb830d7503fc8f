#include "ops/gdn/chunk_fwd_o.h"

#include "metal/gdn/launches.h"
#include "metal/implement.h"
#include "shaders/gdn/chunk_fwd_o.h"
#include "shaders/gdn/chunk_threads.h"

namespace torch_gdn {

Launch launch_chunk_fwd_o(const ChunkFwdOCall& call) {
  const auto& [s, q, k, v_new, h, g_cumsum, cu_seqlens, slots, v_first, scale, o, has_scores] = call;
  ChunkFwdOParameters parameters{};
  parameters.sequence = sequence_parameters(s);
  parameters.slots = slots.parameters;
  parameters.slots.has_flags = 0;  // h is read, never the pool
  parameters.q = row_strides(q);
  parameters.k = row_strides(k);
  parameters.o = row_strides(o);
  parameters.h = state_strides(h, v_first);
  parameters.heads = head_groups(s);
  parameters.value_heads = int32_t(s.HV);
  parameters.output_is_f32 = o.scalar_type() != q.scalar_type();
  parameters.scale = float(scale);
  TemplateArguments arguments = {q.scalar_type(), h.scalar_type(), s.K, s.V, s.C, vector_width({q, k, v_new})};
  if (has_scores) arguments[6] = true;
  return {"chunk_fwd_o",
          "gdn/chunk_fwd_o.metal",
          arguments,
          {q, k, v_new, h, g_cumsum, cu_seqlens, slots.indices, o, Binding::error_log(), Binding::values(parameters)},
          {size_t(s.NT), size_t(s.HV), size_t(s.B)},
          size_t(chunk_threads(int(s.C)))};
}

namespace {

void run(const ChunkFwdO<int64_t>& op, const Tensor& o) {
  launcher().run({launch_chunk_fwd_o({.shape = op.shape,
                                      .q = unit_last_stride(op.q, "q"),
                                      .k = unit_last_stride(op.k, "k"),
                                      .v_new = as_contiguous(op.v, "v"),
                                      .h = as_contiguous(op.h, "h"),
                                      .g_cumsum = as_f32(op.g),
                                      .cu_seqlens = cu_seqlens_on(op.q.device(), op.cu_seqlens),
                                      .slots = {},
                                      .v_first = op.state_v_first,
                                      .scale = scale_or_default(op.scale, op.shape.K),
                                      .o = o})});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<ChunkFwdO, &run>(m); }

}  // namespace torch_gdn
