#include "ops/layers/gdn_gating.h"

#include <ATen/ops/zeros_like.h>

#include "cpu/common.h"
#include "cpu/convert.h"
#include "cpu/define.h"
#include "cpu/exponential.h"

namespace torch_gdn {
namespace {

constexpr int64_t kElements = 4096;  // of a work item

// In place: log decays = factor softplus(a + bias), factor = -exp(A_log).
TORCH_GDN_VECTORISED void log_decays(float* a, const float* factor, const float* bias, int64_t tokens, int64_t HV) {
  for (int64_t token = 0; token < tokens; ++token, a += HV) {
#pragma omp simd
    for (int64_t head = 0; head < HV; ++head) a[head] = factor[head] * cpu::softplus(a[head] + bias[head]);
  }
}

// In place: scale sigmoid(b).
TORCH_GDN_VECTORISED void betas(float* b, int64_t count, float scale) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) b[i] = scale / (1.0f + cpu::exponential(-b[i]));
}

void run(const GdnGating<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [g, beta] = outputs;
  const int64_t HV = op.HV, tokens = g.numel() / HV, at_once = ceil_div(kElements, HV);
  const Tensor factor = op.A_log.to(at::kDouble).exp().neg().to(at::kFloat).contiguous();
  const Tensor bias = op.dt_bias.has_value() ? op.dt_bias->to(at::kFloat).contiguous() : at::zeros_like(factor);
  const auto* factors = factor.const_data_ptr<float>();
  const auto* biases = bias.const_data_ptr<float>();
  // Small beside a layer's other tensors: a copy of views of a fused projection costs next to nothing.
  const Tensor a = op.a.contiguous(), b = op.b.contiguous();
  const auto* a_in = static_cast<const char*>(a.const_data_ptr());
  const auto* b_in = static_cast<const char*>(b.const_data_ptr());
  auto *g_out = g.mutable_data_ptr<float>(), *beta_out = beta.mutable_data_ptr<float>();
  at::parallel_for(0, ceil_div(tokens, at_once), 4, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * at_once; first < std::min(end * at_once, tokens); first += at_once) {
      const int64_t count = std::min(at_once, tokens - first);
      const int64_t at = first * HV;
      cpu::widen(a_in + at * a.element_size(), a.scalar_type(), count * HV, g_out + at);
      cpu::widen(b_in + at * b.element_size(), b.scalar_type(), count * HV, beta_out + at);
      log_decays(g_out + at, factors, biases, count, HV);
      betas(beta_out + at, count * HV, op.allow_neg_eigval ? 2.0f : 1.0f);
    }
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<GdnGating, &run>(m); }

}  // namespace torch_gdn
