#include <torch/library.h>

#include "cpu/common.h"

namespace torch_gdn {
namespace {

Tensor solve_tril(const Tensor& A, const optional<Tensor>& cu_seqlens, const optional<Tensor>& chunk_indices) {
  const auto s = check_solve_tril(A, cu_seqlens, chunk_indices);
  const Tensor strict = unit_last_stride(A, "A");
  Tensor inverse = at::empty({s.B, s.T, s.HV, s.C}, A.options());
  const auto chunks = cpu::chunks_of(s, cu_seqlens);
  cpu::for_each_tile(chunks.size(), s.HV, [&](int64_t i, int64_t head) {
    const auto& chunk = chunks[i];
    const float* in = strict.const_data_ptr<float>() + chunk.batch * strict.stride(0) + chunk.first * strict.stride(1) +
                      head * strict.stride(2);
    float tile[64 * 64];
    cpu::invert_unit_lower(in, strict.stride(1), chunk.length, s.C, tile, s.C);
    cpu::Rows(inverse).write_tile(chunk, head, tile);
  });
  return inverse;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CPU, m) { m.impl("solve_tril", &solve_tril); }

}  // namespace torch_gdn
