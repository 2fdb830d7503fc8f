#include <torch/library.h>

#include "cpu/common.h"

namespace torch_gdn {
namespace {

Tensor l2norm(const Tensor& x, double eps) {
  check_l2norm(x, eps);
  Tensor y = at::empty(x.sizes(), x.options());
  if (x.numel() == 0) return y;
  const int64_t width = x.size(-1);
  const Tensor in_rows = unit_last_stride(x, "x").reshape({1, -1, 1, width}), out_rows = y.view({1, -1, 1, width});
  const cpu::Rows in(in_rows), out(out_rows);
  at::parallel_for(0, in_rows.size(1), 32768 / width + 1, [&](int64_t begin, int64_t end) {
    std::vector<float> row(width);
    for (int64_t i = begin; i < end; ++i) {
      in.read(0, i, 0, 0, width, row.data());
      cpu::normalise_rows(row.data(), 1, width, static_cast<float>(eps));
      out.write(0, i, 0, 0, width, row.data());
    }
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CPU, m) { m.impl("l2norm", &l2norm); }

}  // namespace torch_gdn
