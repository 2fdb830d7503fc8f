#include "ops/aura/aura_encode.h"

#include <cmath>

#include "cpu/aura/codes.h"
#include "cpu/aura/rotation.h"
#include "cpu/aura/vectors.h"
#include "cpu/define.h"

namespace torch_gdn {

namespace {

float subtract_mean(float* x, int64_t D) {
  double sum = 0;
  for (int64_t d = 0; d < D; ++d) sum += x[d];
  const auto mean = static_cast<float>(sum / static_cast<double>(D));
  for (int64_t d = 0; d < D; ++d) x[d] -= mean;
  return mean;
}

struct Encoder {
  const float *signs, *boundaries, *centroids;
  int64_t D, bits;

  // Encodes x, which it overwrites. Returns the norm, which multiplies the centroids.
  float encode(float* x, int32_t* codes) const {
    double square = 0;
    for (int64_t d = 0; d < D; ++d) square += static_cast<double>(x[d]) * x[d];
    const double norm = std::sqrt(square);
    const double factor = norm > 0 ? 1 / (norm * std::sqrt(static_cast<double>(D))) : 0;
    // If the norm's power of two is too small or too large for one factor in f32, two factors apply it.
    int exponent = 0;
    if (norm > 0 && std::isfinite(norm)) std::frexp(norm, &exponent);
    const auto first = static_cast<float>(std::ldexp(1.0, -exponent / 2));
    const auto second = static_cast<float>(std::ldexp(1.0, -(exponent - exponent / 2)));
    for (int64_t d = 0; d < D; ++d) x[d] = x[d] * first * second;
    cpu::rotate(x, signs, D, false);
    const auto rest = static_cast<float>(std::ldexp(factor, exponent));
    for (int64_t d = 0; d < D; ++d) x[d] *= rest;
    cpu::aura_kernels().quantise(x, boundaries, D, bits, codes);
    double kept = 0;
    for (int64_t d = 0; d < D; ++d) kept += static_cast<double>(centroids[codes[d]]) * centroids[codes[d]];
    return static_cast<float>(norm / std::sqrt(kept));
  }
};

int64_t slot_of(const Tensor& slots, int64_t b, int64_t t) {
  const int64_t at = slots.dim() == 1 ? t * slots.stride(0) : b * slots.stride(0) + t * slots.stride(1);
  return slots.scalar_type() == at::kInt ? slots.const_data_ptr<int32_t>()[at] : slots.const_data_ptr<int64_t>()[at];
}

// Encodes x [B, H, T, D] into codes [B, H, S, words], norms and means [B, H, S]. Without slots, token t goes to slot t.
void encode(const AuraEncoder<int64_t>& op, const optional<Tensor>& slots, const EncodedVectors& encoded) {
  const auto& codes = encoded.codes;
  const Tensor x = cpu::as_vectors(op.x, "x");
  const cpu::Rows in(x);
  const Tensor signs = op.signs.contiguous(), boundaries = op.boundaries.contiguous();
  const Tensor codebook = op.codebook.contiguous();
  const Encoder encoder{signs.const_data_ptr<float>(), boundaries.const_data_ptr<float>(),
                        codebook.const_data_ptr<float>(), op.D, op.bits};
  cpu::for_each_vector(x, [&](int64_t b, int64_t h, int64_t t) {
    const int64_t slot = slots.has_value() ? slot_of(*slots, b, t) : t;
    if (slot < 0) return;
    alignas(64) float row[cpu::kLargestD];
    alignas(64) int32_t codes_of_row[cpu::kLargestD];
    in.read(b, h, t, 0, op.D, row);
    if (encoded.means.has_value()) cpu::set_value(*encoded.means, b, h, slot, subtract_mean(row, op.D));
    cpu::set_norm(encoded.norms, b, h, slot, encoder.encode(row, codes_of_row));
    int32_t* words = codes.mutable_data_ptr<int32_t>() + cpu::offset_of(codes, b, h, slot);
    cpu::pack_codes(codes_of_row, op.D, op.bits, words);
  });
}

void run(const AuraEncode<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto& [codes, norms, means] = outputs;
  EncodedVectors encoded{cpu::as_vectors(codes, "codes"), cpu::as_values(norms), std::nullopt};
  if (op.with_means) encoded.means = cpu::as_values(means);
  encode(op, std::nullopt, encoded);
}

void run_in_place(const AuraEncodeInPlace<int64_t>& op) { encode(op, op.slots, op.cache); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) {
  cpu::define<AuraEncode, &run>(m);
  cpu::define<AuraEncodeInPlace, &run_in_place>(m);
}

}  // namespace torch_gdn
