#include "ops/layers/gdn_gating.h"

#include <ATen/ops/zeros_like.h>

#include "cpu/common.h"
#include "cpu/define.h"
#include "cpu/simd/layer_kernels.h"

namespace torch_gdn {
namespace {

constexpr int64_t kElements = 4096;  // per work item

void run(const GdnGating<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [g, beta] = outputs;
  const int64_t HV = op.HV, tokens = g.numel() / HV, at_once = ceil_div(kElements, HV);
  const Tensor factor = op.A_log.to(at::kDouble).exp().neg().to(at::kFloat).contiguous();
  const Tensor bias = op.dt_bias.has_value() ? op.dt_bias->to(at::kFloat).contiguous() : at::zeros_like(factor);
  const auto* factors = factor.const_data_ptr<float>();
  const auto* biases = bias.const_data_ptr<float>();
  // These tensors are small compared with the layer's other tensors, so copying views of a fused projection costs
  // almost nothing.
  const Tensor a = op.a.contiguous(), b = op.b.contiguous();
  const auto* a_in = static_cast<const char*>(a.const_data_ptr());
  const auto* b_in = static_cast<const char*>(b.const_data_ptr());
  auto *g_out = g.mutable_data_ptr<float>(), *beta_out = beta.mutable_data_ptr<float>();
  const auto& rows = cpu::row_kernels();
  const auto& gating = cpu::gating_kernels();
  at::parallel_for(0, ceil_div(tokens, at_once), 4, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * at_once; first < std::min(end * at_once, tokens); first += at_once) {
      const int64_t count = std::min(at_once, tokens - first);
      const int64_t at = first * HV;
      rows.upcast(a_in + at * a.element_size(), a.scalar_type(), count * HV, g_out + at);
      rows.upcast(b_in + at * b.element_size(), b.scalar_type(), count * HV, beta_out + at);
      gating.log_decays(g_out + at, factors, biases, count, HV);
      gating.betas(beta_out + at, count * HV, op.allow_neg_eigval ? 2.0f : 1.0f);
    }
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<GdnGating, &run>(m); }

}  // namespace torch_gdn
