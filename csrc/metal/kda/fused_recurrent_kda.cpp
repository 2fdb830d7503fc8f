// By the kernel of fused_recurrent_gated_delta_rule.
#include "ops/kda/fused_recurrent_kda.h"

#include "metal/gdn/launches.h"
#include "metal/implement.h"

namespace torch_gdn {

namespace {

void run(const FusedRecurrentKda<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [o, final_state] = outputs;
  if (op.shape.T == 0) return copy_state(op.initial_state, final_state);
  launcher().run({launch_fused_recurrent_gated_delta_rule(
      rule_inputs(op), op.channels, state_io(op.initial_state, final_state, op.state_v_first), o)});
}

void run_in_place(const FusedRecurrentKdaInPlace<int64_t>& op, const Tensor& o) {
  launcher().run({launch_fused_recurrent_gated_delta_rule(
      rule_inputs(op), op.channels, state_io(op.q.device(), op.pool, op.state_v_first), op.out.value_or(o))});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  metal::implement<FusedRecurrentKda, &run>(m);
  metal::implement<FusedRecurrentKdaInPlace, &run_in_place>(m);
}

}  // namespace torch_gdn
