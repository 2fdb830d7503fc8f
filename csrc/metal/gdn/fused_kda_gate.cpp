#include "ops/gdn/fused_kda_gate.h"

#include "metal/gates.h"
#include "metal/implement.h"
#include "shaders/kda/fused_kda_gate.h"

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

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<FusedKdaGate, &run>(m); }

}  // namespace torch_gdn
