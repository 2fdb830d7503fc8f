#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "metal/gdn/launches.h"

namespace torch_gdn {

namespace {

Launch launch(const ChunkShape& shape, const Tensor& A, const optional<Tensor>& bounds, const Tensor& A_inv) {
  const SolveParameters parameters{sequence_parameters(shape), int32_t(shape.HV)};
  return {"solve_tril",
          "gdn/solve_tril.metal",
          {std::to_string(shape.C)},
          {A, or_stand_in(bounds, A), A_inv, Binding::values(parameters)},
          {size_t(shape.NT), size_t(shape.HV), size_t(shape.B)},
          size_t(2 * shape.C)};
}

Tensor solve_tril(const Tensor& A, const optional<Tensor>& cu_seqlens, const optional<Tensor>& chunk_indices) {
  const auto shape = check_solve_tril(A, cu_seqlens, chunk_indices);
  const auto A_inv = at::empty(A.sizes(), A.options());
  const auto bounds = sequence_bounds(cu_seqlens, A.device());
  launcher().run({launch(shape, as_contiguous(A, "A"), bounds, A_inv)});
  return A_inv;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { m.impl("solve_tril", solve_tril); }

}  // namespace torch_gdn
