#include "ops/gdn/solve_tril.h"

#include "cpu/common.h"
#include "cpu/define.h"

namespace torch_gdn {

namespace {

void run(const SolveTril<int64_t>& op, const Tensor& A_inv) {
  const auto& s = op.shape;
  const Tensor A = unit_last_stride(op.A, "A");
  const auto chunks = cpu::chunks_of(s, op.cu_seqlens);
  cpu::for_each_tile(chunks.size(), s.HV, [&](int64_t i, int64_t head) {
    const auto& chunk = chunks[i];
    const float* in =
        A.const_data_ptr<float>() + chunk.batch * A.stride(0) + chunk.first * A.stride(1) + head * A.stride(2);
    float tile[64 * 64];
    cpu::row_kernels().invert_unit_lower(in, A.stride(1), chunk.length, s.C, tile, s.C);
    cpu::Rows(A_inv).write_tile(chunk, head, tile);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<SolveTril, &run>(m); }

}  // namespace torch_gdn
