#include "ops/experts/moe_gate_up.h"

#include <ATen/ops/silu.h>

#include "cpu/define.h"
#include "cpu/experts/groups.h"

namespace torch_gdn {
namespace {

Tensor activated(const Tensor& gate, const Tensor& up, at::ScalarType dtype) {
  return at::silu(gate).mul_(up).to(dtype);
}

void run(const MoeGateUp<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [hidden, shared_hidden] = outputs;
  const auto& s = op.shape;
  if (s.T == 0) return;
  Tensor rows = hidden.view({s.T * s.k, s.I});
  rows.zero_();
  for (const auto& [expert, pairs] : cpu::pairs_of_experts(op.topk_ids)) {
    const Tensor x = op.x.index_select(0, pairs.floor_divide(s.k));
    const Tensor both = cpu::multiply(x, cpu::weights_of(op.w_gate_up, op.w_scales, op.w_biases, op.packing, expert));
    rows.index_copy_(0, pairs, activated(both.narrow(1, 0, s.I), both.narrow(1, s.I, s.I), x.scalar_type()));
  }
  if (!op.shared_gate_proj.has_value()) return;
  const Tensor gate =
      cpu::weights_of(*op.shared_gate_proj, op.shared_gate_scales, op.shared_gate_biases, op.shared_packing);
  const Tensor up = cpu::weights_of(*op.shared_up_proj, op.shared_up_scales, op.shared_up_biases, op.shared_packing);
  shared_hidden.copy_(activated(cpu::multiply(op.x, gate), cpu::multiply(op.x, up), op.x.scalar_type()));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<MoeGateUp, &run>(m); }

}  // namespace torch_gdn
