#include "ops/gdn/kda_gate.h"

#include "metal/gates.h"
#include "metal/implement.h"
#include "metal/layers/rows.h"
#include "shaders/kda/parameters.h"

namespace torch_gdn {

namespace {

void run(const FusedKdaGate<int64_t>& op, const Tensor& log_decays) {
  if (log_decays.numel() == 0) return;
  const Tensor g = op.g.dim() == 4 ? op.g : op.g.reshape({1, -1, op.HV, op.K});
  const ChannelGates gates = channel_gates_of(g, "g", op.gate);
  const int32_t channels = int32_count(op.HV * op.K, "fused_kda_gate: g", "channels of a token");
  const int32_t tokens = int32_count(log_decays.numel() / channels, "fused_kda_gate: g", "tokens");
  const KdaGateParameters parameters{gates.parameters, int32_t(g.size(1)), int32_t(op.HV), int32_t(op.K)};
  launcher().run({{"kda/fused_kda_gate",
                   {log_decays.scalar_type()},
                   {*gates.g, gates.A_log, gates.dt_bias, log_decays, parameters},
                   {ceil_div(channels, kKdaGateThreads), tokens, 1},
                   kKdaGateThreads}});
}

constexpr int64_t kGateTokens = 32;        // per threadgroup, at least
constexpr int64_t kMostGateBlocks = 1024;  // so that few partial sums are left to add

void fused_kda_gate_bwd(const FusedKdaGateBwd<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto& [dg, dA_log, ddt_bias] = outputs;
  if (dg.numel() == 0) {
    for (const Tensor& sum : {dA_log, ddt_bias}) sum.zero_();
    return;
  }
  const auto as_tokens = [&](const Tensor& x, const char* name) {
    return unit_last_stride(x.dim() == 4 ? x : x.reshape({1, -1, op.HV, op.K}), name);
  };
  const Tensor g = as_tokens(op.g, "g"), dy = as_tokens(op.dy, "dy");
  const ChannelGates gates = channel_gates_of(g, "g", op.gate);
  const int32_t channels = int32_count(op.HV * op.K, "fused_kda_gate_bwd: g", "channels of a token");
  const int32_t tokens = int32_count(dg.numel() / channels, "fused_kda_gate_bwd: g", "tokens");
  const int64_t at_once = std::max(kGateTokens, ceil_div(int64_t(tokens), kMostGateBlocks));
  const int64_t blocks = ceil_div(tokens, at_once);
  const KdaGateBwdParameters parameters{gates.parameters, row_strides(dy), int32_t(g.size(1)), int32_t(op.HV),
                                        int32_t(op.K),    tokens,          int32_t(at_once)};
  const Tensor dA_log_partials = partial_sums(g, dA_log.numel() > 0 ? blocks : 0, channels);
  const Tensor dbias_partials = partial_sums(g, ddt_bias.numel() > 0 ? blocks : 0, channels);
  launcher().run({{"kda/fused_kda_gate_bwd",
                   {dy.scalar_type(), g.scalar_type()},
                   {dy, g, gates.A_log, gates.dt_bias, dg, dA_log_partials, dbias_partials, parameters},
                   {ceil_div(channels, kKdaGateBwdThreads), blocks, 1},
                   kKdaGateBwdThreads}});
  if (dA_log.numel() > 0) launcher().run({launch_sum_partials(dA_log_partials, dA_log)});
  if (ddt_bias.numel() > 0) launcher().run({launch_sum_partials(dbias_partials, ddt_bias)});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  metal::implement<FusedKdaGate, &run>(m);
  metal::implement<FusedKdaGateBwd, &fused_kda_gate_bwd>(m);
}

}  // namespace torch_gdn
