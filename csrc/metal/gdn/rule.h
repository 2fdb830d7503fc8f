// What the delta rules' kernels read and write: states, and inputs in the form that the kernels read.
#pragma once
#include "metal/gates.h"
#include "metal/slots.h"
#include "ops/gdn/gated_delta_rule.h"

namespace torch_gdn {

// The initial and final states: two tensors, or one pool for both.
struct StateIo {
  optional<Tensor> source;
  Tensor target;  // undefined if it was not requested
  Slots slots;
  Checkpoints checkpoints;
  bool v_first;

  at::ScalarType dtype() const {
    return source.has_value() ? source->scalar_type() : target.defined() ? target.scalar_type() : at::kFloat;
  }

  // Returns whether the recurrent kernels move S through threadgroup memory, where threads read along V. They read
  // along K only if both states allow vectors of 4 keys.
  bool value_is_inner() const;

  // Returns the last bindings of every kernel that carries a state, in the kernels' order.
  template <typename Parameters, typename... Output>
  auto bindings(const optional<Tensor>& cu_seqlens, const Parameters& parameters, const Output&... outputs) const {
    return std::tuple_cat(std::tuple(slots.source(source), Binding(cu_seqlens), Binding(slots.indices),
                                     Binding(slots.flags), Binding(checkpoints.offsets), Binding(checkpoints.indices),
                                     Binding(outputs)..., Binding(target), Binding::error_log()),
                          std::tie(parameters));
  }

  template <typename Parameters>
  void set(Parameters& parameters) const {
    parameters.slots = slots.parameters;
    parameters.checkpoints = checkpoints.parameters;
    if (source.has_value()) {
      parameters.initial_state = state_strides(*source, v_first);
      parameters.has_initial_state = 1;
    }
    if (target.defined()) {
      parameters.final_state = state_strides(target, v_first);
      parameters.has_final_state = 1;
    }
  }
};

// A final state without elements was not requested.
StateIo state_io(const optional<Tensor>& initial_state, const Tensor& final_state, bool v_first);
StateIo state_io(at::Device device, const StatePool& pool, bool v_first);

// Returns whether 4 values of a key, or 4 keys of a value, are contiguous and start at a multiple of 4.
bool has_vector_states(const Tensor& state, bool v_first, bool value_inner);

// Copies the state, for calls without tokens.
void copy_state(const optional<Tensor>& initial_state, const Tensor& final_state);

Grid state_threadgroups(const ChunkShape<>& shape);

struct RuleInputs {
  ChunkShape<> shape;
  Tensor q, k, v;
  Gates gates;
  ChannelGates gk, gv;
  optional<Tensor> cu_seqlens;
  double scale;
  bool normalise;

  template <typename Parameters>
  Parameters parameters(const StateIo& states, const Tensor& o) const {
    Parameters parameters{};
    parameters.sequence = sequence_parameters(shape, cu_seqlens);
    parameters.q = row_strides(q);
    parameters.k = row_strides(k);
    parameters.v = row_strides(v);
    parameters.o = row_strides(o);
    parameters.gates = gates.parameters;
    parameters.heads = head_groups(shape);
    parameters.value_heads = int32_t(shape.HV);
    parameters.value_size = int32_t(shape.V);
    parameters.counted_chunk_size = int32_t(shape.C);
    parameters.scale = float(scale);
    states.set(parameters);
    return parameters;
  }
};

RuleInputs rule_inputs(const GatedDeltaRule<>& op);

// If the call asks for normalised q and k, replaces them by new tensors. The returned launches fill these.
std::vector<Launch> normalise_keys(RuleInputs& in);

// Tensors must be checked and allocated.
Launch launch_fused_recurrent_gated_delta_rule(const RuleInputs& in, const StateIo& states, const Tensor& o);

}  // namespace torch_gdn
