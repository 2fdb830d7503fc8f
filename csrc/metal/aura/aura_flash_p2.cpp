#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "metal/aura/aura_flash.h"

namespace torch_gdn {

Launch launch_aura_flash_p2(const AuraShape& shape, const Partials& partials, const Tensor& value_signs,
                            const optional<Tensor>& sinks, const Tensor& o) {
  const bool has_means = partials.mean.dim() == 4;
  const MergeParameters parameters{vector_parameters(o), int32_t(shape.NB), has_means ? 1 : 0,
                                   sinks.has_value() ? 1 : 0};
  return {
      "aura_flash_p2",
      "aura/aura_flash_p2.metal",
      {metal_type(o.scalar_type()), std::to_string(shape.D)},
      {partials.o, partials.m, partials.l, has_means ? partials.mean : partials.l,
       sinks.has_value() ? sinks->contiguous() : value_signs, value_signs.contiguous(), o, Binding::values(parameters)},
      {rotation_groups(parameters.vectors.count, shape.D), 1, 1},
      kThreads};
}

namespace {

Tensor aura_flash_p2(const Tensor& o_partials, const Tensor& m_partials, const Tensor& l_partials,
                     const Tensor& value_signs, const optional<Tensor>& mean_partials, const optional<Tensor>& sinks,
                     optional<at::ScalarType> dtype) {
  const auto shape = check_aura_flash_p2(o_partials, m_partials, l_partials, value_signs, mean_partials, sinks, dtype);
  const auto o =
      at::empty({shape.B, shape.HQ, shape.L, shape.D}, o_partials.options().dtype(dtype.value_or(at::kFloat)));
  if (shape.NB == 0) return o.zero_();
  const auto mean = mean_partials.has_value() ? mean_partials->contiguous() : at::empty({0}, o_partials.options());
  launcher().run(
      {launch_aura_flash_p2(shape, {o_partials.contiguous(), m_partials.contiguous(), l_partials.contiguous(), mean},
                            value_signs, sinks, o)});
  return o;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { m.impl("aura_flash_p2", aura_flash_p2); }

}  // namespace torch_gdn
