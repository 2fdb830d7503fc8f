#pragma once
#include "metal/parameters.h"
#include "ops/slots.h"

namespace torch_gdn {

// Returns indices on the device. int32 indices, which servers keep, are not converted: that would cost a dispatch.
struct Slots {
  optional<Tensor> indices, flags, accepted;
  SlotParameters parameters{};

  // Returns the binding for the states to read. In place there is none: kernels read the pool through the pointer that
  // writes it (states_to_read in shaders/core/slots.h).
  Binding source(const optional<Tensor>& states) const { return parameters.slots != 0 ? Binding() : Binding(states); }
};

struct Checkpoints {
  optional<Tensor> offsets, indices;
  CheckpointParameters parameters{};
};

Checkpoints checkpoints_on(at::Device device, const StatePool& pool, int64_t multiple);

// Launches locate_slots for more than 32 indices on the device.
Slots slots_on(at::Device device, const StatePool& pool);

}  // namespace torch_gdn
