#include "ops/gdn/solve_tril.h"

#include "metal/implement.h"
#include "shaders/gdn/chunk_threads.h"
#include "shaders/gdn/solve_tril.h"

namespace torch_gdn {

namespace {

void run(const SolveTril<int64_t>& op, const Tensor& A_inv) {
  const auto& s = op.shape;
  const Tensor A = as_contiguous(op.A, "A");
  const auto cu_seqlens = index_array(A.device(), op.cu_seqlens);
  const SolveTrilParameters parameters{sequence_parameters(s, cu_seqlens), int32_t(s.HV)};
  launcher().run({{"gdn/solve_tril",
                   {s.C},
                   {A, cu_seqlens, A_inv, Binding::error_log(), parameters},
                   {s.NT, s.HV, s.B},
                   chunk_threads(int(s.C))}});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<SolveTril, &run>(m); }

}  // namespace torch_gdn
