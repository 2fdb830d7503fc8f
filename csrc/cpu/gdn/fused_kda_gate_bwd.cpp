#include "ops/gdn/fused_kda_gate_bwd.h"

#include <ATen/ops/ones.h>

#include "cpu/define.h"
#include "cpu/layers/partial_sums.h"
#include "cpu/simd/layer_kernels.h"

namespace torch_gdn {
namespace {

void fused_kda_gate_bwd(const FusedKdaGateBwd<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto& [dg, dA_log, ddt_bias] = outputs;
  const int64_t channels = op.HV * op.K, tokens = channels == 0 ? 0 : dg.numel() / channels;
  const int64_t at_once = cpu::tokens_of_block(tokens, 64), blocks = ceil_div(tokens, at_once);
  const auto per_channel = [&](const optional<Tensor>& x, int64_t K) {
    const Tensor values = x.has_value() ? x->to(at::kDouble).reshape({op.HV, K}) : at::zeros({op.HV, K}, at::kDouble);
    return values.expand({op.HV, op.K});
  };
  const Tensor rate = per_channel(op.gate.A_log, 1).exp().to(at::kFloat).contiguous();
  const Tensor bias = per_channel(op.gate.dt_bias, op.K).to(at::kFloat).contiguous();
  const Tensor dy = op.dy.contiguous(), g = op.g.contiguous();
  const Tensor dA_log_partials = cpu::partial_sums(blocks, channels),
               dbias_partials = cpu::partial_sums(blocks, channels);
  const auto& rows = cpu::row_kernels();
  const auto row_at = [&](const Tensor& x, int64_t token) {
    return static_cast<const char*>(x.const_data_ptr()) + token * channels * x.element_size();
  };
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(2 * channels);
    for (int64_t token = begin * at_once; token < std::min(end * at_once, tokens); ++token) {
      float *dy_row = scratch.data(), *g_row = dy_row + channels;
      rows.upcast(row_at(dy, token), dy.scalar_type(), channels, dy_row);
      rows.upcast(row_at(g, token), g.scalar_type(), channels, g_row);
      const int64_t sums = token / at_once * channels;
      cpu::gating_kernels().differentiate({.dy = dy_row,
                                           .g = g_row,
                                           .rate = rate.const_data_ptr<float>(),
                                           .bias = bias.const_data_ptr<float>(),
                                           .lower_bound = static_cast<float>(op.gate.lower_bound.value_or(0)),
                                           .count = channels,
                                           .dg = g_row,
                                           .dA_log = dA_log_partials.mutable_data_ptr<float>() + sums,
                                           .dbias = dbias_partials.mutable_data_ptr<float>() + sums});
      rows.downcast(g_row, channels, dg.scalar_type(), const_cast<char*>(row_at(dg, token)));
    }
  });
  cpu::add_partial_sums(dA_log_partials, dA_log);
  cpu::add_partial_sums(dbias_partials, ddt_bias);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<FusedKdaGateBwd, &fused_kda_gate_bwd>(m); }

}  // namespace torch_gdn
