#include "ops/layers/l2norm.h"

#include "metal/implement.h"
#include "metal/layers/l2norm.h"
#include "metal/layers/rows.h"
#include "shaders/layers/l2norm.h"

namespace torch_gdn {

Launch launch_l2norm(const Tensor& x, double eps, const Tensor& y) {
  auto parameters = row_parameters<L2NormParameters>(x, "l2norm: x");
  parameters.eps = float(eps);
  return {"l2norm",
          "layers/l2norm.metal",
          {x.scalar_type(), x.size(3)},
          {x, y, Binding::values(parameters)},
          {size_t(ceil_div(parameters.rows, kL2NormRows)), 1, 1},
          32 * kL2NormRows};
}

namespace {

void run(const L2Norm<int64_t>& op, const Tensor& y) {
  TORCH_CHECK_VALUE(op.x.size(-1) <= kL2NormLargestRow, "l2norm: x: expected a last dimension of at most ",
                    kL2NormLargestRow, ", got ", op.x.size(-1));
  if (y.numel() > 0) launcher().run({launch_l2norm(as_rows(op.x, "x"), op.eps, y)});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<L2Norm, &run>(m); }

}  // namespace torch_gdn
