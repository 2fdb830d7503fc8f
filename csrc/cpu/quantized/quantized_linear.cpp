#include "ops/quantized/quantized_linear.h"

#include <ATen/Parallel.h>

#include <vector>

#include "cpu/define.h"
#include "cpu/quantized/dequantized.h"

namespace torch_gdn {
namespace {

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
  const cpu::PackedRows weight(op.weight, op.scales, op.biases, op.packing);
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

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<QuantizedLinear, &run>(m); }

}  // namespace torch_gdn
