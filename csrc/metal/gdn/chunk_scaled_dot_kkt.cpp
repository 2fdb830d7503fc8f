#include "ops/gdn/chunk_scaled_dot_kkt.h"

#include "metal/implement.h"
#include "shaders/gdn/chunk_scaled_dot_kkt.h"
#include "shaders/gdn/chunk_threads.h"

namespace torch_gdn {

namespace {

void run(const ChunkScaledDotKkt<int64_t>& op, const Tensor& A) {
  const auto& s = op.shape;
  const Tensor k = unit_last_stride(op.k, "k"), g_cumsum = as_f32(op.g), beta = as_f32(op.beta);
  const auto cu_seqlens = index_array(k.device(), op.cu_seqlens);
  const ChunkScaledDotKktParameters parameters{sequence_parameters(s, cu_seqlens), row_strides(k), head_groups(s),
                                               int32_t(s.HV)};
  launcher().run({{"gdn/chunk_scaled_dot_kkt",
                   {k.scalar_type(), s.K, s.C, vector_width({k})},
                   {k, g_cumsum, beta, cu_seqlens, A, Binding::error_log(), parameters},
                   {s.NT, s.H, s.B},
                   chunk_threads(int(s.C))}});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<ChunkScaledDotKkt, &run>(m); }

}  // namespace torch_gdn
