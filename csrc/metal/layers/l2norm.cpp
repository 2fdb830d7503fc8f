#include "ops/layers/l2norm.h"

#include "metal/implement.h"
#include "metal/layers/l2norm.h"
#include "metal/layers/rows.h"
#include "shaders/layers/l2norm.h"

namespace torch_gdn {

Launch launch_l2norm(const Tensor& x, double eps, const Tensor& y, const optional<Tensor>& rstd) {
  const int64_t D = x.size(3);
  auto parameters = row_parameters<L2NormParameters>(x, "l2norm: x");
  parameters.has_rstd = rstd.has_value() ? 1 : 0;
  parameters.D = D;
  parameters.eps = float(eps);
  return {"layers/l2norm",
          {x.scalar_type(), D <= kL2NormBlock ? D : 0},
          {x, y, rstd, parameters},
          {ceil_div(parameters.rows, kL2NormRows), 1, 1},
          32 * kL2NormRows};
}

namespace {

void run(const L2Norm<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [y, rstd] = outputs;
  if (op.finish_without_elements(y, rstd)) return;
  launcher().run(
      {launch_l2norm(as_rows(op.x, "x"), op.eps, y, op.return_rstd ? optional<Tensor>(rstd) : std::nullopt)});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<L2Norm, &run>(m); }

}  // namespace torch_gdn
