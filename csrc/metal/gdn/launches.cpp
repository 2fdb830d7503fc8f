#include "metal/gdn/launches.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "metal/layers/l2norm.h"
#include "shaders/core/norm_eps.h"

namespace torch_gdn {

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

std::array<size_t, 3> state_threadgroups(const ChunkShape<>& shape) {
  return {size_t(ceil_div(shape.V, kStateColumns)), size_t(shape.HV), size_t(shape.N)};
}

RuleInputs rule_inputs(const GatedDeltaRule<>& op) {
  return {.shape = op.shape,
          .q = unit_last_stride(op.q, "q"),
          .k = unit_last_stride(op.k, "k"),
          .v = unit_last_stride(op.v, "v"),
          .gates = gates_of(op.g, op.beta, op.gates),
          .cu_seqlens = cu_seqlens_on(op.q.device(), op.cu_seqlens),
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

PrefillChoice choose_prefill(const ChunkedRule<int64_t>& op, bool has_channel_decays) {
  if (op.return_intermediate_states) return {PrefillAlgorithm::kChunked};  // the others keep states in registers
  const auto& s = op.shape;
  const int64_t sequences = std::max<int64_t>(s.N, 1);
  const int64_t tokens = s.packed ? ceil_div(s.T, sequences) : s.T;
  const auto& device = launcher().device();
  return prefill_algorithm({tokens, sequences * s.HV, s.K, s.V, has_channel_decays}, device.name,
                           int64_t(device.core_count));
}

}  // namespace torch_gdn
