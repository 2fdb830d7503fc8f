#include "ops/experts/moe_down.h"

#include <ATen/ops/zeros.h>

#include "cpu/define.h"
#include "cpu/experts/groups.h"

namespace torch_gdn {
namespace {

void run(const MoeDown<int64_t>& op, const Tensor& y) {
  const auto& s = op.shape;
  if (s.T == 0) return;
  const Tensor hidden = op.hidden.reshape({s.T * s.k, s.I});
  const Tensor weights = op.topk_weights.to(at::kFloat).reshape({s.T * s.k, 1});
  Tensor sum = at::zeros({s.T, s.D}, at::kFloat);
  for (const auto& [expert, pairs] : cpu::pairs_of_experts(op.topk_ids)) {
    const Tensor matrix = cpu::weights_of(op.w_down, op.w_scales, op.w_biases, op.packing, expert);
    const Tensor product = cpu::multiply(hidden.index_select(0, pairs), matrix);
    sum.index_add_(0, pairs.floor_divide(s.k), product.mul_(weights.index_select(0, pairs)));
  }
  if (op.shared_hidden.has_value()) {
    const Tensor matrix = cpu::weights_of(*op.shared_down_proj, op.shared_scales, op.shared_biases, op.shared_packing);
    Tensor product = cpu::multiply(*op.shared_hidden, matrix);
    if (op.shared_gate.has_value()) product.mul_(op.shared_gate->to(at::kFloat).sigmoid());
    sum.add_(product);
  }
  if (op.residual.has_value()) sum.add_(*op.residual);
  y.copy_(sum);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<MoeDown, &run>(m); }

}  // namespace torch_gdn
