#include <torch/library.h>

#include <cmath>

#include "cpu/aura/aura_common.h"

namespace torch_gdn {
namespace {

// A coordinate's code is the number of boundaries below it, found bit by bit; a NaN is above none.
TORCH_GDN_VECTORISED void quantise(const float* y, const float* boundaries, int64_t D, int64_t bits, int32_t* codes) {
  std::fill(codes, codes + D, 0);
  for (int32_t step = 1 << (bits - 1); step > 0; step /= 2) {
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) codes[d] += y[d] > boundaries[codes[d] + step - 1] ? step : 0;
  }
}

// One vector on its way.
struct Encoder {
  const float *signs, *boundaries, *centroids;
  int64_t D, bits;
  alignas(64) float y[cpu::kLargestD];
  alignas(64) int32_t codes[cpu::kLargestD];

  float take_mean() {
    double sum = 0;
    for (int64_t d = 0; d < D; ++d) sum += y[d];
    const auto mean = static_cast<float>(sum / static_cast<double>(D));
    for (int64_t d = 0; d < D; ++d) y[d] -= mean;
    return mean;
  }

  // From y = x to codes; returns the norm that the codes' centroids are multiplied by.
  float encode() {
    double square = 0;
    for (int64_t d = 0; d < D; ++d) square += static_cast<double>(y[d]) * y[d];
    const double norm = std::sqrt(square);
    const double factor = norm > 0 ? 1 / (norm * std::sqrt(static_cast<double>(D))) : 0;
    // Too small or too large to be multiplied by in f32: in two steps then.
    int exponent = 0;
    if (norm > 0 && std::isfinite(norm)) std::frexp(norm, &exponent);
    const auto first = static_cast<float>(std::ldexp(1.0, -exponent / 2));
    const auto second = static_cast<float>(std::ldexp(1.0, -(exponent - exponent / 2)));
    for (int64_t d = 0; d < D; ++d) y[d] = y[d] * first * second;
    cpu::rotate(y, signs, D, false);
    const auto rest = static_cast<float>(std::ldexp(factor, exponent));
    for (int64_t d = 0; d < D; ++d) y[d] *= rest;
    quantise(y, boundaries, D, bits, codes);
    double kept = 0;
    for (int64_t d = 0; d < D; ++d) kept += static_cast<double>(centroids[codes[d]]) * centroids[codes[d]];
    return static_cast<float>(norm / std::sqrt(kept));
  }
};

int64_t slot_of(const Tensor& slots, int64_t b, int64_t t) {
  const int64_t at = slots.dim() == 1 ? t * slots.stride(0) : b * slots.stride(0) + t * slots.stride(1);
  return slots.scalar_type() == at::kInt ? slots.const_data_ptr<int32_t>()[at] : slots.const_data_ptr<int64_t>()[at];
}

// x [B, HK, T, D] into slots of codes [B, HK, S, words]; without slots token t goes to slot t.
void encode_rows(const AuraShape& s, const Tensor& x, const optional<Tensor>& slots, const Tensor& signs,
                 const Tensor& boundaries, const Tensor& codebook, const Tensor& codes, const Tensor& norms,
                 const optional<Tensor>& means) {
  if (x.numel() == 0) return;
  const Tensor unit = unit_last_stride(x, "x");
  const cpu::Rows in(unit);
  const Tensor signs_row = signs.contiguous(), boundaries_row = boundaries.contiguous(), row = codebook.contiguous();
  const int64_t heads = x.size(1), tokens = x.size(2);
  at::parallel_for(0, x.size(0) * heads * tokens, 64, [&](int64_t begin, int64_t end) {
    Encoder encoder{signs_row.const_data_ptr<float>(), boundaries_row.const_data_ptr<float>(),
                    row.const_data_ptr<float>(), s.D, s.key_bits};
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = i % tokens, h = i / tokens % heads, b = i / tokens / heads;
      const int64_t slot = slots.has_value() ? slot_of(*slots, b, t) : t;
      if (slot < 0) continue;
      in.read(b, h, t, 0, s.D, encoder.y);
      if (means.has_value()) {
        means->mutable_data_ptr<float>()[cpu::place_of(*means, b, h, slot)] = encoder.take_mean();
      }
      norms.mutable_data_ptr<float>()[cpu::place_of(norms, b, h, slot)] = encoder.encode();
      cpu::pack_codes(encoder.codes, s.D, s.key_bits, const_cast<int32_t*>(cpu::words_at(codes, b, h, slot)));
    }
  });
}

std::tuple<Tensor, Tensor, Tensor> aura_encode(const Tensor& x, const Tensor& signs, const Tensor& boundaries,
                                               const Tensor& codebook, bool with_means) {
  const auto s = check_aura_encode(x, signs, boundaries, codebook, with_means);
  std::vector<int64_t> rows = x.sizes().slice(0, x.dim() - 1).vec();
  const Tensor norms = at::empty(rows, x.options().dtype(at::kFloat));
  const Tensor means = with_means ? at::empty(rows, norms.options()) : at::empty({0}, norms.options());
  rows.push_back(code_words(s.D, s.key_bits));
  const Tensor codes = at::empty(rows, x.options().dtype(at::kInt));
  encode_rows(s, cpu::as_four(x), std::nullopt, signs, boundaries, codebook, cpu::as_four(codes), cpu::as_three(norms),
              with_means ? optional<Tensor>(cpu::as_three(means)) : std::nullopt);
  return {codes, norms, means};
}

void aura_encode_(const Tensor& x, const Tensor& slots, const Tensor& signs, const Tensor& boundaries,
                  const Tensor& codebook, const Tensor& codes, const Tensor& norms, const optional<Tensor>& means) {
  const auto s = check_aura_encode_(x, slots, signs, boundaries, codebook, codes, norms, means);
  encode_rows(s, x, slots, signs, boundaries, codebook, codes, norms, means);
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CPU, m) {
  m.impl("aura_encode", &aura_encode);
  m.impl("aura_encode_", &aura_encode_);
}

}  // namespace torch_gdn
