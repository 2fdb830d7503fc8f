#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "metal/gdn/launches.h"

namespace torch_gdn {

namespace {

Tensor chunk_local_cumsum(const Tensor& g_any, int64_t chunk_size, const optional<Tensor>& cu_seqlens,
                          const optional<Tensor>& chunk_indices) {
  const auto shape = check_chunk_local_cumsum(g_any, chunk_size, cu_seqlens, chunk_indices);
  const auto g = readable(g_any), g_cumsum = at::empty(g.sizes(), g.options().dtype(at::kFloat));
  const ChunkLocalCumsumParameters parameters{sequence_parameters(shape), row_strides(g), element_type(g), int32_t(shape.HV)};
  launcher().run({{"chunk_local_cumsum",
                   "gdn/chunk_local_cumsum.metal",
                   {std::to_string(shape.C)},
                   {g, or_dummy(cu_seqlens_on(g.device(), cu_seqlens), g), g_cumsum, Binding::error_log(),
                    Binding::values(parameters)},
                   {size_t(shape.NT), size_t(ceil_div(shape.HV, 32)), size_t(shape.B)},
                   32}});
  return g_cumsum;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { m.impl("chunk_local_cumsum", chunk_local_cumsum); }

}  // namespace torch_gdn
