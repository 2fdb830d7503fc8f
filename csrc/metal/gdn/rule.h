// What the kernels that go through a whole sequence at once, token by token or chunk by chunk, are told alike.
#pragma once
#include "metal/gdn/launches.h"

namespace torch_gdn {

template <typename Parameters>
Parameters rule_parameters(const ChunkShape<>& shape, const Tensor& q, const Tensor& k, const Tensor& v,
                           const Gates& gates, const StateIo& states, const RuleOptions& options, const Tensor& o) {
  Parameters parameters{};
  parameters.sequence = sequence_parameters(shape);
  parameters.q = row_strides(q);
  parameters.k = row_strides(k);
  parameters.v = row_strides(v);
  parameters.gates = gates.parameters;
  parameters.heads = head_groups(shape);
  parameters.value_heads = int32_t(shape.HV);
  parameters.value_size = int32_t(shape.V);
  parameters.output_is_f32 = o.scalar_type() != q.scalar_type();
  parameters.scale = float(options.scale);
  parameters.slots = states.slots.parameters;
  if (states.source.has_value()) {
    parameters.initial_state = state_strides(*states.source, options.state_v_first);
    parameters.has_initial_state = 1;
  }
  if (states.target.defined()) {
    parameters.final_state = state_strides(states.target, options.state_v_first);
    parameters.has_final_state = 1;
  }
  return parameters;
}

// A threadgroup for each 32 columns of V of each head of each sequence.
inline std::array<size_t, 3> rule_threadgroups(const ChunkShape<>& shape) {
  return {size_t(ceil_div(shape.V, 32)), size_t(shape.HV), size_t(shape.N)};
}

}  // namespace torch_gdn
