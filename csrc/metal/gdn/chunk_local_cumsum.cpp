#include "ops/gdn/chunk_local_cumsum.h"

#include "metal/gates.h"
#include "metal/implement.h"
#include "shaders/gdn/chunk_local_cumsum.h"

namespace torch_gdn {

namespace {

void run(const ChunkLocalCumsum<int64_t>& op, const Tensor& g_cumsum) {
  const auto& s = op.shape;
  const Tensor g = readable(op.g);
  const auto cu_seqlens = index_array(g.device(), op.cu_seqlens);
  const ChunkLocalCumsumParameters parameters{sequence_parameters(s, cu_seqlens), row_strides(g), element_type(g),
                                              int32_t(s.HV)};
  launcher().run({{"gdn/chunk_local_cumsum",
                   {s.C},
                   {g, cu_seqlens, g_cumsum, Binding::error_log(), parameters},
                   {s.NT, ceil_div(s.HV, kCumsumHeads), s.B},
                   kCumsumHeads}});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<ChunkLocalCumsum, &run>(m); }

}  // namespace torch_gdn
