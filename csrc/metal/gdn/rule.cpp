#include "metal/gdn/rule.h"

#include <ATen/ops/empty.h>

#include "metal/layers/rows.h"
#include "shaders/core/parameters.h"
#include "shaders/gdn/parameters.h"

namespace torch_gdn {

bool StateIo::value_is_inner() const {
  const auto has_key_vectors = [&](const Tensor& state) { return has_vector_states(state, v_first, false); };
  return !((!source.has_value() || has_key_vectors(*source)) && (!target.defined() || has_key_vectors(target)));
}

bool has_vector_states(const Tensor& state, bool v_first, bool value_inner) {
  const auto strides = state_strides(state, v_first);
  const Tensor inner_last = v_first == value_inner ? state.mT() : state;
  return (value_inner ? strides.value : strides.key) == 1 && vector_width({inner_last}) == 4;
}

StateIo state_io(const optional<Tensor>& initial_state, const Tensor& final_state, bool v_first) {
  return {.source = initial_state.has_value() ? optional(initial_state->to(at::kFloat)) : std::nullopt,
          .target = final_state.dim() > 1 ? final_state : Tensor(),
          .slots = {},
          .checkpoints = {},
          .v_first = v_first};
}

StateIo state_io(at::Device device, const StatePool& pool, bool v_first) {
  return {.source = pool.states,
          .target = pool.states,
          .slots = slots_on(device, pool),
          .checkpoints = checkpoints_on(device, pool, kCheckpointMultiple),
          .v_first = v_first};
}

void copy_state(const optional<Tensor>& initial_state, const Tensor& final_state) {
  if (final_state.dim() == 1) return;
  if (initial_state.has_value()) {
    final_state.copy_(*initial_state);
  } else {
    final_state.zero_();
  }
}

Grid state_threadgroups(const ChunkShape<>& shape) { return {ceil_div(shape.V, kStateColumns), shape.HV, shape.N}; }

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
