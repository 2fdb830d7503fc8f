#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "metal/gdn/launches.h"

namespace torch_gdn {

Launch launch_l2norm(const Tensor& x, double eps, const Tensor& y) {
  const int64_t rows = x.size(0) * x.size(1) * x.size(2);
  const NormParameters parameters{int32_t(x.size(1)), int32_t(x.size(2)), rows, row_strides(x), float(eps)};
  return {"l2norm",
          "layers/l2norm.metal",
          {metal_type(x.scalar_type()), std::to_string(x.size(3))},
          {x, y, Binding::values(parameters)},
          {size_t(ceil_div(rows, 4)), 1, 1},
          128};
}

namespace {

Tensor l2norm(const Tensor& x_any, double eps) {
  check_l2norm(x_any, eps);
  TORCH_CHECK_VALUE(x_any.size(-1) <= 1024, "l2norm: x: expected a last dimension of at most 1024, got ",
                    x_any.size(-1));
  const auto y = at::empty(x_any.sizes(), x_any.options());
  auto x = unit_last_stride(x_any, "x");
  while (x.dim() < 4) x = x.unsqueeze(0);
  if (x.dim() > 4) x = as_contiguous(x, "x").flatten(2, -2).flatten(0, x.dim() - 5).view({1, -1, 1, x.size(-1)});
  launcher().run({launch_l2norm(x, eps, y)});
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { m.impl("l2norm", l2norm); }

}  // namespace torch_gdn
