#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "metal/gdn/launches.h"

namespace torch_gdn {

namespace {

Launch launch(const ChunkShape<>& shape, const Tensor& k, const Tensor& g, const Tensor& beta,
              const optional<Tensor>& cu_seqlens, const Tensor& A) {
  const ChunkScaledDotKktParameters parameters{sequence_parameters(shape), row_strides(k), head_groups(shape), int32_t(shape.HV)};
  return {"chunk_scaled_dot_kkt",
          "gdn/chunk_scaled_dot_kkt.metal",
          {metal_type(k.scalar_type()), std::to_string(shape.K), std::to_string(shape.C), vector_width({k})},
          {k, g, beta, or_dummy(cu_seqlens, g), A, Binding::values(parameters)},
          {size_t(shape.NT), size_t(shape.H), size_t(shape.B)},
          size_t(2 * shape.C)};
}

Tensor chunk_scaled_dot_kkt(const Tensor& k_any, const Tensor& g, const Tensor& beta,
                            const optional<Tensor>& cu_seqlens, int64_t chunk_size,
                            const optional<Tensor>& chunk_indices) {
  const auto shape = check_chunk_scaled_dot_kkt(k_any, g, beta, cu_seqlens, chunk_size, chunk_indices);
  const auto k = unit_last_stride(k_any, "k");
  const auto A = at::empty({shape.B, shape.T, shape.HV, shape.C}, g.options());
  const auto cu_seqlens = cu_seqlens_on(k.device(), cu_seqlens);
  launcher().run({launch(shape, k, as_f32(g), as_f32(beta), cu_seqlens, A)});
  return A;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { m.impl("chunk_scaled_dot_kkt", chunk_scaled_dot_kkt); }

}  // namespace torch_gdn
