#include "ops/layers/l2norm.h"

#include "cpu/common.h"
#include "cpu/define.h"

namespace torch_gdn {

namespace {

void run(const L2Norm<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [y, rstd] = outputs;
  if (op.finish_without_elements(y, rstd)) return;
  const int64_t width = y.size(-1);
  const Tensor x_rows = unit_last_stride(op.x, "x").reshape({1, -1, 1, width}), y_rows = y.view({1, -1, 1, width});
  const cpu::Rows in(x_rows), out(y_rows);
  const auto normalise = cpu::row_kernels().normalise;
  const float eps = static_cast<float>(op.eps);
  float* factors = op.return_rstd ? rstd.mutable_data_ptr<float>() : nullptr;
  at::parallel_for(0, x_rows.size(1), 32768 / width + 1, [&](int64_t begin, int64_t end) {
    std::vector<float> row(width);
    normalise(in.head(0, begin, 0, 0), out.head(0, begin, 0, 0), end - begin, width, eps, row.data(),
              factors ? factors + begin : nullptr);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<L2Norm, &run>(m); }

}  // namespace torch_gdn
