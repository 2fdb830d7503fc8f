#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "launches.h"

namespace torch_gdn {

Launch launch_chunk_local_cumsum(const ChunkShape& shape, const Gates& gates, const optional<Tensor>& bounds,
                                 const Tensor& g_cumsum, const Tensor& steps) {
  const CumsumParameters parameters{sequence_parameters(shape), gates.parameters, int32_t(shape.HV), steps.defined()};
  const Tensor& g = *gates.g;
  return {"chunk_local_cumsum",
          "gdn/chunk_local_cumsum.metal",
          {std::to_string(shape.C)},
          {g, or_stand_in(gates.beta, g), or_stand_in(gates.A_log, g), or_stand_in(gates.dt_bias, g),
           or_stand_in(bounds, g), g_cumsum, steps.defined() ? steps : g_cumsum, Binding::error_log(),
           Binding::values(parameters)},
          {size_t(shape.NT), size_t(ceil_div(shape.HV, 32)), size_t(shape.B)},
          32};
}

namespace {

Tensor chunk_local_cumsum(const Tensor& g, int64_t chunk_size, const optional<Tensor>& cu_seqlens,
                          const optional<Tensor>& chunk_indices) {
  const auto shape = check_chunk_local_cumsum(g, chunk_size, cu_seqlens, chunk_indices);
  const auto g_cumsum = at::empty(g.sizes(), g.options().dtype(at::kFloat));
  const auto bounds = sequence_bounds(cu_seqlens, g.device());
  launcher().run({launch_chunk_local_cumsum(shape, gates_of(g, std::nullopt, {}), bounds, g_cumsum, Tensor())});
  return g_cumsum;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { m.impl("chunk_local_cumsum", chunk_local_cumsum); }

}  // namespace torch_gdn
