#include "metal/gdn/rule_inputs.h"

#include <ATen/ops/empty.h>

#include "metal/layers/l2norm.h"
#include "shaders/core/norm_eps.h"

namespace torch_gdn {

RuleInputs rule_inputs(const GatedDeltaRule<>& op) {
  return {.shape = op.shape,
          .q = unit_last_stride(op.q, "q"),
          .k = unit_last_stride(op.k, "k"),
          .v = unit_last_stride(op.v, "v"),
          .gates = gates_of(op.g, op.beta, op.gates),
          .gk = channel_gates_of(op.channels.gk, op.channels.gk_name, op.channels.gate),
          .gv = channel_gates_of(op.channels.gv, "gv", {}),
          .cu_seqlens = index_array(op.q.device(), op.cu_seqlens),
          .scale = scale_or_default(op.scale, op.shape.K),
          .normalise = op.use_qk_l2norm};
}

std::vector<Launch> normalise_keys(RuleInputs& in) {
  if (!in.normalise) return {};
  const auto q = at::empty(in.q.sizes(), in.q.options()), k = at::empty(in.k.sizes(), in.k.options());
  std::vector<Launch> launches = {launch_l2norm(in.q, kNormEps, q), launch_l2norm(in.k, kNormEps, k)};
  in.q = q;
  in.k = k;
  return launches;
}

}  // namespace torch_gdn
