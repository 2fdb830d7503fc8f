// The states that a launch reads and writes.
#pragma once
#include "metal/slots.h"
#include "ops/chunk_shape.h"

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

}  // namespace torch_gdn
