#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "metal/aura/aura_flash.h"

namespace torch_gdn {

Partials new_partials(const AuraShape& shape, const Tensor& like, bool with_means) {
  const auto f32 = like.options().dtype(at::kFloat);
  const std::vector<int64_t> sizes = {shape.B, shape.HQ, shape.L, shape.NB};
  return {at::empty({shape.B, shape.HQ, shape.L, shape.NB, shape.D}, f32), at::empty(sizes, f32), at::empty(sizes, f32),
          with_means ? at::empty(sizes, f32) : at::empty({0}, f32)};
}

int64_t rows_together(const AuraShape& shape) {
  const int64_t rows = shape.L * (shape.HQ / shape.HK);
  if (rows >= kMatrixRows) return 32;
  return rows == 1 ? 1 : rows == 2 ? 2 : rows <= 4 ? 4 : 8;
}

Launch launch_aura_flash_p1(const AuraShape& shape, const Tensor& q_rot, const optional<Tensor>& q_sums,
                            const Cache& cache, const Visibility& visibility, const Partials& partials) {
  const auto& [starts_any, causal, window] = visibility;
  const auto starts = starts_any.has_value() ? optional<Tensor>(starts_any->contiguous()) : std::nullopt;
  FlashParameters parameters{};
  parameters.q = vector_strides(q_rot);
  parameters.key_codes = vector_strides(cache.key_codes);
  parameters.key_norms = vector_strides(cache.key_norms);
  parameters.value_codes = vector_strides(cache.value_codes);
  parameters.value_norms = vector_strides(cache.value_norms);
  if (cache.key_means.has_value()) {
    parameters.q_sums = vector_strides(*q_sums);
    parameters.key_means = vector_strides(*cache.key_means);
  }
  if (cache.value_means.has_value()) parameters.value_means = vector_strides(*cache.value_means);
  parameters.kv_heads = int32_t(shape.HK);
  parameters.ratio = int32_t(shape.HQ / shape.HK);
  parameters.queries = int32_t(shape.L);
  parameters.keys = int32_t(shape.T);
  parameters.block_size = int32_t(std::min<int64_t>(shape.block_size, INT32_MAX / 2));
  parameters.blocks = int32_t(shape.NB);
  parameters.q_offset = int32_t(shape.q_offset);
  parameters.causal = causal ? 1 : 0;
  parameters.window = int32_t(window);
  parameters.has_key_means = cache.key_means.has_value() ? 1 : 0;
  parameters.has_value_means = cache.value_means.has_value() ? 1 : 0;
  if (starts.has_value()) parameters.start_words = starts->scalar_type() == at::kLong ? 2 : 1;
  const int64_t together = rows_together(shape), row_tiles = ceil_div(shape.L * parameters.ratio, together);
  const bool is_matrix = together == 32;
  const std::string kernel = is_matrix ? "aura_flash_p1_matrix" : "aura_flash_p1";
  std::vector<std::string> arguments = {std::to_string(shape.key_bits), std::to_string(shape.value_bits),
                                        std::to_string(shape.D)};
  if (!is_matrix) arguments.push_back(std::to_string(together));
  const int64_t column_groups = is_matrix ? ceil_div(shape.D, 256) : 1;
  return {kernel,
          "aura/" + kernel + ".metal",
          arguments,
          {q_rot, or_dummy(q_sums, q_rot), cache.key_codes, cache.key_norms,
           or_dummy(cache.key_means, cache.key_norms), cache.key_codebook.contiguous(), cache.value_codes,
           cache.value_norms, or_dummy(cache.value_means, cache.value_norms), cache.value_codebook.contiguous(),
           or_dummy(starts, cache.key_codes), partials.o, partials.m, partials.l,
           cache.value_means.has_value() ? partials.mean : partials.l, Binding::values(parameters)},
          {size_t(shape.NB * column_groups), size_t(shape.HK * row_tiles), size_t(shape.B)},
          kThreads};
}

namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> aura_flash_p1(
    const Tensor& q_rot, const Tensor& key_codes, const Tensor& key_norms, const Tensor& key_codebook,
    const Tensor& value_codes, const Tensor& value_norms, const Tensor& value_codebook,
    const optional<Tensor>& key_means, const optional<Tensor>& q_sums, const optional<Tensor>& value_means,
    const optional<Tensor>& starts, bool causal, optional<int64_t> q_offset, int64_t window, int64_t block_size) {
  const auto shape =
      check_aura_flash_p1(q_rot, key_codes, key_norms, key_codebook, value_codes, value_norms, value_codebook,
                          key_means, q_sums, value_means, starts, causal, q_offset, window, block_size);
  const auto partials = new_partials(shape, q_rot, value_means.has_value());
  const Cache cache{unit_last_stride(key_codes, "key_codes"),
                    key_norms,
                    key_codebook,
                    unit_last_stride(value_codes, "value_codes"),
                    value_norms,
                    value_codebook,
                    key_means,
                    value_means};
  launcher().run({launch_aura_flash_p1(shape, unit_last_stride(q_rot, "q_rot"), q_sums, cache, {starts, causal, window},
                                       partials)});
  return {partials.o, partials.m, partials.l, partials.mean};
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { m.impl("aura_flash_p1", aura_flash_p1); }

}  // namespace torch_gdn
