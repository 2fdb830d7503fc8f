#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "metal/aura/vectors.h"

namespace torch_gdn {

Launch launch_aura_rotate(const Tensor& x, const Tensor& signs, double scale, bool inverse, const Tensor& y,
                          const optional<Tensor>& sums) {
  const RotateParameters parameters{vector_parameters(x), vector_strides(x), float(scale), sums.has_value() ? 1 : 0};
  return {"aura_rotate",
          "aura/aura_rotate.metal",
          {metal_type(x.scalar_type()), std::to_string(x.size(3)), inverse ? "true" : "false"},
          {x, signs.contiguous(), y, or_dummy(sums, y), Binding::values(parameters)},
          {rotation_groups(parameters.vectors.count, x.size(3)), 1, 1},
          kThreads};
}

namespace {

Tensor aura_rotate(const Tensor& x, const Tensor& signs, double scale, bool inverse) {
  check_aura_rotate(x, signs, scale, inverse);
  const auto y = at::empty(x.sizes(), x.options().dtype(at::kFloat));
  launcher().run({launch_aura_rotate(as_vectors(x, "x"), signs, scale, inverse, y, std::nullopt)});
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { m.impl("aura_rotate", aura_rotate); }

}  // namespace torch_gdn
