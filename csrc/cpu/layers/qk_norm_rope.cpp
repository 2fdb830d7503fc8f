#include "ops/layers/qk_norm_rope.h"

#include <array>
#include <cmath>
#include <vector>

#include "cpu/define.h"
#include "cpu/layers/rows.h"
#include "cpu/simd/row_kernels.h"

namespace torch_gdn {
namespace {

constexpr int64_t kElements = 16384;  // a core takes at least so many

// Sums in f32, so that squares overflow as on a GPU.
float sum_of_squares(const float* x, int64_t count) {
  constexpr int64_t kSums = 16;
  std::array<float, kSums> sums{};
  for (int64_t i = 0; i < count; ++i) sums[i % kSums] += x[i] * x[i];
  float total = 0;
  for (const float sum : sums) total += sum;
  return total;
}

// x * rsqrt(mean of x^2 + eps) * weight.
void normalise(float* x, const float* weight, float offset, float eps, int64_t D) {
  const float scale = 1.0f / std::sqrt(sum_of_squares(x, D) / float(D) + eps);
  for (int64_t i = 0; i < D; ++i) x[i] *= scale * (weight[i] + offset);
}

void rotate(float* x, const float* cos, const float* sin, int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i) {
    const float first = x[i], second = x[i + pairs];
    x[i] = first * cos[i] - second * sin[i];
    x[i + pairs] = second * cos[i] + first * sin[i];
  }
}

// `weight` is undefined if there is no norm.
void run_heads(const QkNormRope<int64_t>& op, const Tensor& x_any, const Tensor& weight, const Tensor& out) {
  if (out.numel() == 0) return;
  const Tensor x = unit_last_stride(x_any, "q or k");
  const Tensor cos = op.cos.to(at::kFloat).contiguous(), sin = op.sin.to(at::kFloat).contiguous();
  const cpu::RowsOf rows(x);
  const cpu::Rows target(op.heads_first ? out.transpose(1, 2) : out);
  const int64_t tokens = x.size(1), heads = x.size(2);
  const float* const weights = weight.defined() ? weight.const_data_ptr<float>() : nullptr;
  const auto *cosines = cos.const_data_ptr<float>(), *sines = sin.const_data_ptr<float>();
  at::parallel_for(0, out.numel() / op.D, ceil_div(kElements, op.D), [&](int64_t begin, int64_t end) {
    std::vector<float> values(op.D);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t token = row / heads;
      cpu::row_kernels().upcast(rows.at(row), x.scalar_type(), op.D, values.data());
      if (weights) normalise(values.data(), weights, op.zero_centered ? 1.0f : 0.0f, float(op.eps), op.D);
      rotate(values.data(), cosines + token * op.P, sines + token * op.P, op.P);
      target.write(token / tokens, token % tokens, row % heads, 0, op.D, values.data());
    }
  });
}

Tensor in_f32(const optional<Tensor>& weight) {
  return weight.has_value() ? weight->to(at::kFloat).contiguous() : Tensor();
}

void run(const QkNormRope<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  run_heads(op, op.q, in_f32(op.q_weight), std::get<0>(outputs));
  run_heads(op, op.k, in_f32(op.k_weight), std::get<1>(outputs));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<QkNormRope, &run>(m); }

}  // namespace torch_gdn
