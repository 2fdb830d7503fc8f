#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "metal/aura/vectors.h"

namespace torch_gdn {

namespace {

// x [B, H, T, D] into codes [B, H, S, words], norms and means [B, H, S]; without slots token t goes to slot t.
Launch launch_aura_encode(const AuraShape& shape, const Tensor& x, const optional<Tensor>& slots, const Tensor& signs,
                          const Tensor& boundaries, const Tensor& codebook, const Tensor& codes, const Tensor& norms,
                          const optional<Tensor>& means) {
  EncodeParameters parameters{};
  parameters.vectors = vector_parameters(x);
  parameters.x = vector_strides(x);
  parameters.codes = vector_strides(codes);
  parameters.norms = vector_strides(norms);
  if (means.has_value()) {
    parameters.means = vector_strides(*means);
    parameters.has_means = 1;
  }
  if (slots.has_value()) {
    parameters.slot_words = slots->scalar_type() == at::kLong ? 2 : 1;
    parameters.slot_token = slots->stride(-1) * parameters.slot_words;
    parameters.slot_batch = slots->dim() == 2 ? slots->stride(0) * parameters.slot_words : 0;
  }
  parameters.capacity = int32_t(std::min<int64_t>(codes.size(2), INT32_MAX));
  return {"aura_encode",
          "aura/aura_encode.metal",
          {metal_type(x.scalar_type()), std::to_string(shape.key_bits), std::to_string(shape.D)},
          {x, or_dummy(slots, x), signs.contiguous(), boundaries.contiguous(), codebook.contiguous(), codes, norms,
           or_dummy(means, norms), Binding::error_log(), Binding::values(parameters)},
          {rotation_groups(parameters.vectors.count, shape.D), 1, 1},
          kThreads};
}

std::tuple<Tensor, Tensor, Tensor> aura_encode(const Tensor& x, const Tensor& signs, const Tensor& boundaries,
                                               const Tensor& codebook, bool with_means) {
  const auto shape = check_aura_encode(x, signs, boundaries, codebook, with_means);
  std::vector<int64_t> rows = x.sizes().slice(0, x.dim() - 1).vec();
  const auto norms = at::empty(rows, x.options().dtype(at::kFloat));
  const auto means = with_means ? at::empty(rows, norms.options()) : at::empty({0}, norms.options());
  rows.push_back(code_words(shape.D, shape.key_bits));
  const auto codes = at::empty(rows, x.options().dtype(at::kInt));
  const auto kept = with_means ? optional<Tensor>(as_values(means, "means")) : std::nullopt;
  launcher().run({launch_aura_encode(shape, as_vectors(x, "x"), std::nullopt, signs, boundaries, codebook,
                                     as_vectors(codes, "codes"), as_values(norms, "norms"), kept)});
  return {codes, norms, means};
}

void aura_encode_(const Tensor& x, const Tensor& slots, const Tensor& signs, const Tensor& boundaries,
                  const Tensor& codebook, const Tensor& codes, const Tensor& norms, const optional<Tensor>& means) {
  const auto shape = check_aura_encode_(x, slots, signs, boundaries, codebook, codes, norms, means);
  launcher().run(
      {launch_aura_encode(shape, as_vectors(x, "x"), slots, signs, boundaries, codebook, codes, norms, means)});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  m.impl("aura_encode", aura_encode);
  m.impl("aura_encode_", aura_encode_);
}

}  // namespace torch_gdn
