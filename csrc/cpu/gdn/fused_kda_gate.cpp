#include "cpu/define.h"
#include "cpu/gates.h"
#include "cpu/layers/partial_sums.h"
#include "cpu/simd/layer_kernels.h"
#include "ops/gdn/kda_gate.h"

namespace torch_gdn::cpu {
namespace {

void run(const FusedKdaGate<int64_t>& op, const Tensor& log_decays) {
  if (log_decays.numel() == 0) return;
  const auto as_tokens = [&](const Tensor& x) { return x.reshape({1, -1, op.HV, op.K}); };
  write_channel_decays(as_tokens(op.g), op.gate, as_tokens(log_decays));
}

void run(const FusedKdaGateBwd<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto& [dg, dA_log, ddt_bias] = outputs;
  const int64_t channels = op.HV * op.K, tokens = channels == 0 ? 0 : dg.numel() / channels;
  const int64_t at_once = tokens_of_block(tokens, 64), blocks = ceil_div(tokens, at_once);
  const auto per_channel = [&](const optional<Tensor>& x, int64_t K) {
    const Tensor values = x.has_value() ? x->to(at::kDouble).reshape({op.HV, K}) : at::zeros({op.HV, K}, at::kDouble);
    return values.expand({op.HV, op.K});
  };
  const Tensor rate = per_channel(op.gate.A_log, 1).exp().to(at::kFloat).contiguous();
  const Tensor bias = per_channel(op.gate.dt_bias, op.K).to(at::kFloat).contiguous();
  const Tensor dA_log_partials = partial_sums(blocks, channels), dbias_partials = partial_sums(blocks, channels);
  const auto rows_of = [&](const Tensor& x) { return Rows(x.reshape({1, tokens, 1, channels})); };
  const Rows dy = rows_of(op.dy), g = rows_of(op.g), out = rows_of(dg);
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(2 * channels);
    for (int64_t token = begin * at_once; token < std::min(end * at_once, tokens); ++token) {
      float *dy_row = scratch.data(), *g_row = dy_row + channels;
      dy.read(0, token, 0, dy_row);
      g.read(0, token, 0, g_row);
      const int64_t sums = token / at_once * channels;
      gating_kernels().differentiate({.dy = dy_row,
                                      .g = g_row,
                                      .rate = rate.const_data_ptr<float>(),
                                      .bias = bias.const_data_ptr<float>(),
                                      .lower_bound = static_cast<float>(op.gate.lower_bound.value_or(0)),
                                      .count = channels,
                                      .dg = g_row,
                                      .dA_log = dA_log_partials.mutable_data_ptr<float>() + sums,
                                      .dbias = dbias_partials.mutable_data_ptr<float>() + sums});
      out.write(0, token, 0, g_row);
    }
  });
  add_partial_sums(dA_log_partials, dA_log);
  add_partial_sums(dbias_partials, ddt_bias);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) {
  define<FusedKdaGate, &run>(m);
  define<FusedKdaGateBwd, &run>(m);
}

}  // namespace torch_gdn::cpu
