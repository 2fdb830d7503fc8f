#include <torch/library.h>

#include <cmath>

#include "cpu/aura/aura_common.h"

namespace torch_gdn {
namespace {

// The mean of a vector in rotated space is spread over what Pi makes of ones: H signs / sqrt(D).
std::vector<float> rotated_ones(const float* signs, int64_t D) {
  std::vector<float> ones(D, 1.0f);
  cpu::rotate(ones.data(), signs, D, false);
  for (float& x : ones) x /= std::sqrt(static_cast<float>(D));
  return ones;
}

Tensor aura_decode(const Tensor& codes_any, const Tensor& norms_any, const Tensor& codebook, const Tensor& signs,
                   const optional<Tensor>& means_any, bool rotated, optional<at::ScalarType> dtype) {
  const auto s = check_aura_decode(codes_any, norms_any, codebook, signs, means_any, rotated, dtype);
  std::vector<int64_t> sizes = codes_any.sizes().slice(0, codes_any.dim() - 1).vec();
  sizes.push_back(s.D);
  const Tensor x = at::empty(sizes, norms_any.options().dtype(dtype.value_or(at::kFloat)));
  if (x.numel() == 0) return x;
  const Tensor codes = cpu::as_four(unit_last_stride(codes_any, "codes")), norms = cpu::as_three(norms_any);
  const optional<Tensor> means = means_any.has_value() ? optional<Tensor>(cpu::as_three(*means_any)) : std::nullopt;
  const Tensor x_four = cpu::as_four(x), signs_row = signs.contiguous();
  const cpu::Rows out(x_four);
  const cpu::Codebook centroids(codebook, s.key_bits, s.D);
  const auto* sign = signs_row.const_data_ptr<float>();
  const std::vector<float> ones = rotated ? rotated_ones(sign, s.D) : std::vector<float>(s.D, 1.0f);
  const float factor = rotated ? 1.0f : 1.0f / std::sqrt(static_cast<float>(s.D));
  const int64_t heads = codes.size(1), tokens = codes.size(2);
  at::parallel_for(0, codes.size(0) * heads * tokens, 64, [&](int64_t begin, int64_t end) {
    std::vector<float> row(s.D);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = i % tokens, h = i / tokens % heads, b = i / tokens / heads;
      centroids.dequantise(cpu::words_at(codes, b, h, t), row.data());
      if (!rotated) cpu::rotate(row.data(), sign, s.D, true);
      const float norm = norms.const_data_ptr<float>()[cpu::place_of(norms, b, h, t)] * factor;
      const float mean = means.has_value() ? means->const_data_ptr<float>()[cpu::place_of(*means, b, h, t)] : 0.0f;
      for (int64_t d = 0; d < s.D; ++d) row[d] = row[d] * norm + (means.has_value() ? mean * ones[d] : 0.0f);
      out.write(b, h, t, 0, s.D, row.data());
    }
  });
  return x;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CPU, m) { m.impl("aura_decode", &aura_decode); }

}  // namespace torch_gdn
