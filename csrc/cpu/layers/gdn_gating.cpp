#include "ops/layers/gdn_gating.h"

#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "cpu/common.h"
#include "cpu/convert.h"
#include "cpu/exponential.h"

namespace torch_gdn {
namespace {

constexpr int64_t kElements = 4096;  // of some tokens, which are worked on together

// The gates of `tokens` tokens, in place: g = factor softplus(a + bias), factor = -exp(A_log).
TORCH_GDN_VECTORISED void gates(float* a, const float* factor, const float* bias, int64_t tokens, int64_t HV) {
  for (int64_t token = 0; token < tokens; ++token, a += HV) {
#pragma omp simd
    for (int64_t head = 0; head < HV; ++head) a[head] = factor[head] * cpu::softplus(a[head] + bias[head]);
  }
}

TORCH_GDN_VECTORISED void steps(float* b, int64_t count, float largest) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) b[i] = largest / (1.0f + cpu::exponential(-b[i]));
}

std::tuple<Tensor, Tensor> gdn_gating(const Tensor& A_log, const Tensor& a, const Tensor& b,
                                      const optional<Tensor>& dt_bias, bool allow_neg_eigval) {
  const int64_t HV = check_gdn_gating(A_log, a, b, dt_bias, allow_neg_eigval);
  const auto options = a.options().dtype(at::kFloat);
  const Tensor g = at::empty(a.sizes(), options), beta = at::empty(a.sizes(), options);
  const int64_t rows = a.numel() / HV, at_once = ceil_div(kElements, HV);
  const Tensor factor = A_log.to(at::kDouble).exp().neg().to(at::kFloat).contiguous();
  const Tensor bias = dt_bias.has_value() ? dt_bias->to(at::kFloat).contiguous() : at::zeros_like(factor);
  const auto* factors = factor.const_data_ptr<float>();
  const auto* biases = bias.const_data_ptr<float>();
  // The gates of a layer are few: a copy of those that are part of a wider projection costs next to nothing.
  const Tensor a_whole = a.contiguous(), b_whole = b.contiguous();
  const auto *a_in = static_cast<const char*>(a_whole.const_data_ptr()),
             *b_in = static_cast<const char*>(b_whole.const_data_ptr());
  auto *g_out = g.mutable_data_ptr<float>(), *beta_out = beta.mutable_data_ptr<float>();
  at::parallel_for(0, ceil_div(rows, at_once), 4, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * at_once; first < std::min(end * at_once, rows); first += at_once) {
      const int64_t count = std::min(at_once, rows - first);
      const int64_t at = first * HV;
      cpu::widen(a_in + at * a.element_size(), a.scalar_type(), count * HV, g_out + at);
      cpu::widen(b_in + at * b.element_size(), b.scalar_type(), count * HV, beta_out + at);
      gates(g_out + at, factors, biases, count, HV);
      steps(beta_out + at, count * HV, allow_neg_eigval ? 2.0f : 1.0f);
    }
  });
  return {g, beta};
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CPU, m) { m.impl("gdn_gating", &gdn_gating); }

}  // namespace torch_gdn
