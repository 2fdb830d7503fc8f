#include "cpu/quantized/dequantized.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <vector>

#include "cpu/define.h"
#include "ops/quantized/quantized.h"

namespace torch_gdn::cpu {

// Returns biases in f32, also for zero points.
static Tensor float_biases(const Tensor& scales, const Tensor& biases) {
  const Tensor numbers = biases.to(at::kFloat);
  return (has_zero_points(biases) ? numbers.mul(scales.to(at::kFloat)).neg() : numbers).contiguous();
}

// Returns scales in f32. A byte is e8m0, the exponent of a power of two; 0 stands for 2^-127, and 255 for NaN.
static Tensor float_scales(const Tensor& scales) {
  if (scales.scalar_type() != at::kByte) return scales.to(at::kFloat).contiguous();
  const Tensor exponents = scales.contiguous();
  const Tensor result = at::empty(scales.sizes(), scales.options().dtype(at::kFloat));
  const auto* from = exponents.const_data_ptr<uint8_t>();
  std::transform(from, from + result.numel(), result.mutable_data_ptr<float>(), [](uint32_t exponent) {
    return std::bit_cast<float>(exponent == 0 ? 0x00400000u : exponent == 255 ? 0x7fc00000u : exponent << 23);
  });
  return result;
}

PackedRows::PackedRows(const Tensor& weight, const Tensor& scales, const optional<Tensor>& biases,
                       const Packing& packing)
    : weight_(weight),
      scales_(float_scales(scales)),
      biases_(biases.has_value() ? float_biases(scales, *biases) : Tensor()),
      packing_(packing),
      columns_(packing.is_e4m3 ? weight.size(1) : weight.size(1) * 32 / packing.bits) {}

// Dequantises one group. scale * code + bias is computed as scale * (code - middle) + (bias + scale * middle). For
// symmetric codes the second term is exactly 0, and the first is rounded once.
template <int bits>
static void dequantize_group(const uint32_t* words, int64_t group, float scale, float bias, float* target) {
  constexpr int per_word = 32 / bits;
  constexpr int32_t mask = (1 << bits) - 1, middle = 1 << (bits - 1);
  const float rest = bias + scale * float(middle);
  for (int64_t w = 0; w < group / per_word; ++w) {
    for (int i = 0; i < per_word; ++i) {
      target[w * per_word + i] = scale * float(int32_t(words[w] >> (i * bits) & mask) - middle) + rest;
    }
  }
}

// Returns the number that the byte is. The exponent of f32 is 120 more, so the bits of exponent and mantissa are moved
// to their places; without an exponent, twice that less 2^-6 is the number. There is no branch, so that loops
// vectorise.
static float e4m3_number(uint8_t byte) {
  const uint32_t magnitude = byte & 0x7f;
  const float normal = std::bit_cast<float>((magnitude << 20) + (120u << 23));
  const float finite = magnitude < 8 ? 2.0f * normal - 0x1p-6f : normal;
  const uint32_t bits = magnitude == 0x7f ? 0x7fc00000u : std::bit_cast<uint32_t>(finite);
  return std::bit_cast<float>(bits | uint32_t(byte & 0x80) << 24);
}

static void dequantize_e4m3(const uint8_t* bytes, int64_t columns, float scale, float* target) {
  for (int64_t k = 0; k < columns; ++k) target[k] = scale * e4m3_number(bytes[k]);
}

static void dequantize_e2m1(const uint32_t* words, int64_t columns, float scale, float* target) {
  constexpr float numbers[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};
  for (int64_t k = 0; k < columns; ++k) target[k] = scale * numbers[words[k / 8] >> (k % 8 * 4) & 15];
}

void PackedRows::dequantize(int64_t row, float* target) const {
  const int64_t groups = scales_.size(1), group = packing_.group;
  const float* scales = scales_.const_data_ptr<float>() + row / packing_.rows * groups;
  if (packing_.is_e4m3) {
    const auto* bytes = static_cast<const uint8_t*>(weight_.const_data_ptr()) + row * weight_.stride(0);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = g * group;
      dequantize_e4m3(bytes + first, std::min(group, columns_ - first), scales[g], target + first);
    }
    return;
  }
  const auto* words = static_cast<const uint32_t*>(weight_.const_data_ptr()) + row * weight_.stride(0);
  if (packing_.is_e2m1) {
    for (int64_t g = 0; g < groups; ++g) dequantize_e2m1(words + g * 4, group, scales[g], target + g * group);
    return;
  }
  const float* biases = biases_.const_data_ptr<float>() + row * groups;
  const auto dequantize_one = packing_.bits == 4 ? &dequantize_group<4> : &dequantize_group<8>;
  for (int64_t g = 0; g < groups; ++g) {
    dequantize_one(words + g * group * packing_.bits / 32, group, scales[g], biases[g], target + g * group);
  }
}

Tensor dequantized(const Tensor& weight, const Tensor& scales, const optional<Tensor>& biases, const Packing& packing) {
  const PackedRows rows(weight, scales, biases, packing);
  const Tensor result = at::empty({weight.size(0), rows.columns()}, scales.options().dtype(at::kFloat));
  float* target = result.mutable_data_ptr<float>();
  at::parallel_for(0, weight.size(0), 16, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) rows.dequantize(n, target + n * rows.columns());
  });
  return result;
}

namespace {

void run(const Dequantize<int64_t>& op, const Tensor& rows) {
  const PackedRows weight(op.weight, op.scales, op.biases, op.packing);
  const int64_t K = op.K, count = rows.numel() / K;
  const Tensor indices = op.indices.has_value() ? op.indices->to(at::kLong).contiguous() : Tensor();
  const auto* index = indices.defined() ? indices.const_data_ptr<int64_t>() : nullptr;
  const bool is_f32 = rows.scalar_type() == at::kFloat;
  const Tensor decoded = is_f32 ? rows : at::empty(rows.sizes(), rows.options().dtype(at::kFloat));
  auto* target = decoded.mutable_data_ptr<float>();
  at::parallel_for(0, count, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) weight.dequantize(index != nullptr ? index[i] : i, target + i * K);
  });
  if (!is_f32) rows.copy_(decoded);
}

constexpr int64_t kSums = 16;  // sums that the compiler keeps in vectors

float dot(const float* a, const float* b, int64_t K) {
  float sums[kSums] = {};
  int64_t k = 0;
  for (; k + kSums <= K; k += kSums) {
    for (int64_t i = 0; i < kSums; ++i) sums[i] += a[k + i] * b[k + i];
  }
  for (int64_t i = 0; k + i < K; ++i) sums[i] += a[k + i] * b[k + i];
  for (int64_t half = kSums / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

void run(const QuantizedLinear<int64_t>& op, const Tensor& y) {
  if (y.numel() == 0) return;
  const Tensor x = op.x.to(at::kFloat).contiguous();
  const Tensor bias = op.bias.has_value() ? op.bias->to(at::kFloat).contiguous() : Tensor();
  const int64_t M = x.numel() / op.K, N = op.N, K = op.K;
  const Tensor sums = at::empty({M, N}, x.options());
  const PackedRows weight(op.weight, op.scales, op.biases, op.packing);
  const auto* in = x.const_data_ptr<float>();
  const auto* added = bias.defined() ? bias.const_data_ptr<float>() : nullptr;
  auto* out = sums.mutable_data_ptr<float>();
  at::parallel_for(0, N, 8, [&](int64_t begin, int64_t end) {
    std::vector<float> row(K);
    for (int64_t n = begin; n < end; ++n) {
      weight.dequantize(n, row.data());
      for (int64_t m = 0; m < M; ++m) {
        out[m * N + n] = dot(row.data(), in + m * K, K) + (added != nullptr ? added[n] : 0.0f);
      }
    }
  });
  y.copy_(sums.view_as(y));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) {
  define<Dequantize, &run>(m);
  define<QuantizedLinear, &run>(m);
}

}  // namespace torch_gdn::cpu
