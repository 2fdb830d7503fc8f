#include "ops/layers/gdn_gating.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "metal/gates.h"

namespace torch_gdn {

namespace {

constexpr int64_t kThreads = 256;

// As [B, T, HV], with whatever strides it has; with more dimensions than these contiguous.
Tensor three_dimensions(const Tensor& x) {
  if (x.dim() > 3) return x.reshape({1, -1, x.size(-1)});
  Tensor wide = x;
  while (wide.dim() < 3) wide = wide.unsqueeze(0);
  return wide;
}

std::tuple<Tensor, Tensor> gdn_gating(const Tensor& A_log, const Tensor& a, const Tensor& b,
                                      const optional<Tensor>& dt_bias, bool allow_neg_eigval) {
  const int64_t HV = check_gdn_gating(A_log, a, b, dt_bias, allow_neg_eigval);
  const auto options = a.options().dtype(at::kFloat);
  const Tensor g = at::empty(a.sizes(), options), beta = at::empty(a.sizes(), options);
  if (a.numel() == 0) return {g, beta};
  const Tensor rows = three_dimensions(a);
  const Gates gates = gates_of(rows, three_dimensions(b),
                               {.use_gate = true,
                                .A_log = A_log,
                                .dt_bias = dt_bias,
                                .use_sigmoid = true,
                                .allow_neg_eigval = allow_neg_eigval});
  const GdnGatingParameters parameters{gates.parameters, int32_t(rows.size(1)), int32_t(HV), a.numel()};
  launcher().run({{"gdn_gating",
                   "layers/gdn_gating.metal",
                   {std::to_string(kThreads)},
                   {*gates.g, *gates.beta, *gates.A_log, or_dummy(gates.dt_bias, *gates.A_log), g, beta,
                    Binding::values(parameters)},
                   {size_t(ceil_div(a.numel(), kThreads)), 1, 1},
                   kThreads}});
  return {g, beta};
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { m.impl("gdn_gating", gdn_gating); }

}  // namespace torch_gdn
