#include "ops/layers/rms_norm_gated.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "metal/parameters.h"

namespace torch_gdn {

namespace {

// As [B, T, H, D], with whatever strides it has; with more dimensions than these as rows one behind the other.
Tensor four_dimensions(const Tensor& x_any, const char* name) {
  Tensor x = unit_last_stride(x_any, name);
  while (x.dim() < 4) x = x.unsqueeze(0);
  if (x.dim() > 4) x = as_contiguous(x, name).view({1, -1, 1, x.size(-1)});
  return x;
}

Launch launch_rms_norm_gated(const GatedNormShape& shape, const Tensor& x, const Tensor& g,
                             const optional<Tensor>& weight, double eps, bool round_norm, const Tensor& y) {
  RmsNormGatedParameters parameters{};
  parameters.tokens = int32_t(x.size(1));
  parameters.heads = int32_t(x.size(2));
  parameters.rows = shape.rows;
  parameters.x = row_strides(x);
  parameters.gate = row_strides(g);
  parameters.eps = float(eps);
  parameters.has_weight = weight.has_value();
  parameters.has_sigmoid = shape.sigmoid;
  parameters.round_norm = round_norm;
  parameters.round_product = shape.round_product;
  const Tensor factor = weight.has_value() ? weight->contiguous() : x;
  const bool aligned = !weight.has_value() || factor.storage_offset() % 4 == 0;
  return {"rms_norm_gated",
          "layers/rms_norm_gated.metal",
          {metal_type(x.scalar_type()), metal_type(g.scalar_type()), metal_type(factor.scalar_type()),
           std::to_string(shape.D), aligned ? vector_width({x, g}) : "1"},
          {x, g, factor, y, Binding::values(parameters)},
          {size_t(ceil_div(shape.rows, 4)), 1, 1},
          128};
}

Tensor rms_norm_gated(const Tensor& x, const Tensor& g, const optional<Tensor>& weight, double eps,
                      c10::string_view activation, bool round_norm) {
  const auto shape = check_rms_norm_gated(x, g, weight, eps, activation, round_norm);
  const Tensor y = at::empty(x.sizes(), x.options());
  if (shape.rows == 0) return y;
  launcher().run(
      {launch_rms_norm_gated(shape, four_dimensions(x, "x"), four_dimensions(g, "g"), weight, eps, round_norm, y)});
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { m.impl("rms_norm_gated", rms_norm_gated); }

}  // namespace torch_gdn
