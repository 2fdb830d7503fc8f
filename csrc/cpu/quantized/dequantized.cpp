#include "cpu/quantized/dequantized.h"

#include <ATen/Parallel.h>

namespace torch_gdn::cpu {

PackedRows::PackedRows(const Tensor& weight, const Tensor& scales, const Tensor& biases, int64_t bits, int64_t group)
    : weight_(weight),
      scales_(scales.to(at::kFloat).contiguous()),
      biases_((has_zero_points(biases) ? biases.to(at::kFloat).mul(scales.to(at::kFloat)).neg() : biases.to(at::kFloat))
                  .contiguous()),
      bits_(bits),
      group_(group),
      columns_(weight.size(1) * 32 / bits) {}

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

void PackedRows::dequantize(int64_t row, float* target) const {
  const auto* words = static_cast<const uint32_t*>(weight_.const_data_ptr()) + row * weight_.stride(0);
  const int64_t groups = columns_ / group_;
  const float* scales = scales_.const_data_ptr<float>() + row * groups;
  const float* biases = biases_.const_data_ptr<float>() + row * groups;
  const auto of_group = bits_ == 4 ? &dequantize_group<4> : &dequantize_group<8>;
  for (int64_t g = 0; g < groups; ++g) {
    of_group(words + g * group_ * bits_ / 32, group_, scales[g], biases[g], target + g * group_);
  }
}

Tensor dequantized(const Tensor& weight, const Tensor& scales, const Tensor& biases, const Packing& packing) {
  const PackedRows rows(weight, scales, biases, packing.bits, packing.group);
  const Tensor found = at::empty({weight.size(0), rows.columns()}, scales.options().dtype(at::kFloat));
  float* target = found.mutable_data_ptr<float>();
  at::parallel_for(0, weight.size(0), 16, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) rows.dequantize(n, target + n * rows.columns());
  });
  return found;
}

}  // namespace torch_gdn::cpu
