#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "metal/gdn/launches.h"

namespace torch_gdn {

namespace {

Launch launch(const ChunkShape<>& shape, const Tensor& k, const Tensor& v, const Tensor& beta, const Tensor& A,
              const Tensor& g, const optional<Tensor>& cu_seqlens, const Tensor& w, const Tensor& u) {
  const RecomputeWUParameters parameters{sequence_parameters(shape), row_strides(k), row_strides(v), head_groups(shape),
                                       int32_t(shape.HV)};
  return {"recompute_w_u",
          "gdn/recompute_w_u.metal",
          {metal_type(k.scalar_type()), std::to_string(shape.K), std::to_string(shape.V), std::to_string(shape.C),
           vector_width({k, v})},
          {k, v, beta, A, g, or_dummy(cu_seqlens, g), w, u, Binding::values(parameters)},
          {size_t(shape.NT), size_t(shape.HV), size_t(shape.B)},
          size_t(2 * shape.C)};
}

std::tuple<Tensor, Tensor> recompute_w_u(const Tensor& k_any, const Tensor& v_any, const Tensor& beta, const Tensor& A,
                                         const Tensor& g, const optional<Tensor>& cu_seqlens,
                                         const optional<Tensor>& chunk_indices) {
  const auto shape = check_recompute_w_u(k_any, v_any, beta, A, g, cu_seqlens, chunk_indices);
  const auto k = unit_last_stride(k_any, "k"), v = unit_last_stride(v_any, "v");
  const auto w = at::empty({shape.B, shape.T, shape.HV, shape.K}, k.options());
  const auto u = at::empty({shape.B, shape.T, shape.HV, shape.V}, k.options());
  const auto cu_seqlens = cu_seqlens_on(k.device(), cu_seqlens);
  launcher().run({launch(shape, k, v, as_f32(beta), as_contiguous(A, "A"), as_f32(g), cu_seqlens, w, u)});
  return {w, u};
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { m.impl("recompute_w_u", recompute_w_u); }

}  // namespace torch_gdn
