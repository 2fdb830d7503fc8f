#include "ops/gdn/fused_kda_gate.h"

#include "cpu/define.h"
#include "cpu/gates.h"

namespace torch_gdn {

namespace {

void run(const FusedKdaGate<int64_t>& op, const Tensor& log_decays) {
  if (log_decays.numel() == 0) return;
  const auto as_tokens = [&](const Tensor& x) { return x.reshape({1, -1, op.HV, op.K}); };
  cpu::write_channel_decays(as_tokens(op.g), op.gate, as_tokens(log_decays));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<FusedKdaGate, &run>(m); }

}  // namespace torch_gdn
