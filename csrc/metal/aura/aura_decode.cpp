#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "metal/aura/vectors.h"

namespace torch_gdn {

namespace {

Tensor aura_decode(const Tensor& codes_any, const Tensor& norms_any, const Tensor& codebook, const Tensor& signs,
                   const optional<Tensor>& means_any, bool rotated, optional<at::ScalarType> dtype) {
  const auto shape = check_aura_decode(codes_any, norms_any, codebook, signs, means_any, rotated, dtype);
  std::vector<int64_t> sizes = codes_any.sizes().slice(0, codes_any.dim() - 1).vec();
  sizes.push_back(shape.D);
  const auto x = at::empty(sizes, norms_any.options().dtype(dtype.value_or(at::kFloat)));
  const auto codes = as_vectors(codes_any, "codes"), norms = as_values(norms_any, "norms");
  const auto means = means_any.has_value() ? as_values(*means_any, "means") : norms;
  const DecodeParameters parameters{vector_parameters(codes), vector_strides(codes), vector_strides(norms),
                                    vector_strides(means), means_any.has_value() ? 1 : 0};
  launcher().run({{"aura_decode",
                   "aura/aura_decode.metal",
                   {metal_type(x.scalar_type()), std::to_string(shape.key_bits), std::to_string(shape.D),
                    rotated ? "true" : "false"},
                   {codes, norms, codebook.contiguous(), signs.contiguous(), means, x, Binding::values(parameters)},
                   {rotation_groups(parameters.vectors.count, shape.D), 1, 1},
                   kThreads}});
  return x;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { m.impl("aura_decode", aura_decode); }

}  // namespace torch_gdn
