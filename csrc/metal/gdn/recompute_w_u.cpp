#include "ops/gdn/recompute_w_u.h"

#include "metal/implement.h"
#include "shaders/gdn/chunk_threads.h"
#include "shaders/gdn/recompute_w_u.h"

namespace torch_gdn {

namespace {

void run(const RecomputeWU<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& s = op.shape;
  const auto& [w, u] = outputs;
  const Tensor k = unit_last_stride(op.k, "k"), v = unit_last_stride(op.v, "v");
  const Tensor g_cumsum = as_f32(op.g);
  const auto cu_seqlens = index_array(k.device(), op.cu_seqlens);
  const RecomputeWUParameters parameters{sequence_parameters(s, cu_seqlens), row_strides(k), row_strides(v),
                                         head_groups(s), int32_t(s.HV)};
  launcher().run(
      {{"gdn/recompute_w_u",
        {k.scalar_type(), s.K, s.V, s.C, vector_width({k, v})},
        {k, v, as_f32(op.beta), as_contiguous(op.A, "A"), g_cumsum, cu_seqlens, w, u, Binding::error_log(), parameters},
        {s.NT, s.HV, s.B},
        chunk_threads(int(s.C))}});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<RecomputeWU, &run>(m); }

}  // namespace torch_gdn
