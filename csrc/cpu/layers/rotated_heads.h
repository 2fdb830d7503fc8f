// Normalises and rotates the heads of q and k.
#pragma once
#include <array>
#include <cmath>
#include <vector>

#include "cpu/common.h"
#include "ops/layers/rows.h"

namespace torch_gdn::cpu {

// Adds the squares in f32, so that they overflow as they do on a GPU.
inline float sum_of_squares(const float* x, int64_t count) {
  constexpr int64_t kSums = 16;
  std::array<float, kSums> sums{};
  for (int64_t i = 0; i < count; ++i) sums[i % kSums] += x[i] * x[i];
  float total = 0;
  for (const float sum : sums) total += sum;
  return total;
}

// Computes x * rsqrt(mean of x^2 + eps) * weight.
inline void normalise(float* x, const float* weight, float offset, float eps, int64_t D) {
  const float scale = 1.0f / std::sqrt(sum_of_squares(x, D) / float(D) + eps);
  for (int64_t i = 0; i < D; ++i) x[i] *= scale * (weight[i] + offset);
}

inline void rotate(float* x, const float* cos, const float* sin, int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i) {
    const float first = x[i], second = x[i + pairs];
    x[i] = first * cos[i] - second * sin[i];
    x[i + pairs] = second * cos[i] + first * sin[i];
  }
}

// Calls write(token, head, values) for each head of x [B, T, H, D], which is q or k. `token` counts the tokens of all
// sequences. Without a weight, there is no norm.
template <typename Write>
void rotated_heads(const QkNormRope<int64_t>& op, const Tensor& x, const optional<Tensor>& weight_any,
                   const Write& write) {
  if (x.numel() == 0) return;
  const Tensor cos = op.cos.to(at::kFloat).contiguous(), sin = op.sin.to(at::kFloat).contiguous();
  const Tensor weight = weight_any.has_value() ? weight_any->to(at::kFloat).contiguous() : Tensor();
  const Rows rows(x, "q or k");
  const int64_t heads = x.size(2);
  const float* const weights = weight.defined() ? weight.const_data_ptr<float>() : nullptr;
  const auto *cosines = cos.const_data_ptr<float>(), *sines = sin.const_data_ptr<float>();
  at::parallel_for(0, x.numel() / op.D, ceil_div(kElementsPerCore, op.D), [&](int64_t begin, int64_t end) {
    std::vector<float> values(op.D);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t token = row / heads;
      rows.read(token / op.T, token % op.T, row % heads, values.data());
      if (weights) normalise(values.data(), weights, op.zero_centered ? 1.0f : 0.0f, float(op.eps), op.D);
      rotate(values.data(), cosines + token * op.P, sines + token * op.P, op.P);
      write(token, row % heads, values.data());
    }
  });
}

// Writes these heads to out, [B, T, H, D] with any strides.
inline void write_heads(const QkNormRope<int64_t>& op, const Tensor& x, const optional<Tensor>& weight,
                        const Tensor& out) {
  const Rows target(out);
  rotated_heads(op, x, weight, [&](int64_t token, int64_t head, const float* values) {
    target.write(token / op.T, token % op.T, head, values);
  });
}

}  // namespace torch_gdn::cpu
