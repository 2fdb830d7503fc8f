#include "ops/layers/l2norm.h"

#include "metal/gdn/launches.h"
#include "metal/implement.h"

namespace torch_gdn {

namespace {
constexpr int64_t kLargestRow = 1024;
}  // namespace

Launch launch_l2norm(const Tensor& x, double eps, const Tensor& y) {
  const int64_t rows = x.size(0) * x.size(1) * x.size(2);
  const L2NormParameters parameters{int32_t(x.size(1)), int32_t(x.size(2)), rows, row_strides(x), float(eps)};
  return {"l2norm",
          "layers/l2norm.metal",
          {metal_type(x.scalar_type()), std::to_string(x.size(3))},
          {x, y, Binding::values(parameters)},
          {size_t(ceil_div(rows, 4)), 1, 1},
          128};
}

namespace {

void run(const L2Norm<int64_t>& op, const Tensor& y) {
  TORCH_CHECK_VALUE(op.x.size(-1) <= kLargestRow, "l2norm: x: expected a last dimension of at most ", kLargestRow,
                    ", got ", op.x.size(-1));
  auto x = unit_last_stride(op.x, "x");
  while (x.dim() < 4) x = x.unsqueeze(0);
  if (x.dim() > 4) x = as_contiguous(x, "x").flatten(2, -2).flatten(0, x.dim() - 5).view({1, -1, 1, x.size(-1)});
  launcher().run({launch_l2norm(x, op.eps, y)});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<L2Norm, &run>(m); }

}  // namespace torch_gdn
