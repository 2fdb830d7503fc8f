#pragma once
#include "metal/parameters.h"
#include "ops/slots.h"

namespace torch_gdn {

// Holds indices on the device. int32 indices, which servers keep, are not converted, because that would cost a
// dispatch.
struct Slots {
  optional<Tensor> indices, flags, accepted;
  SlotParameters parameters{};

  // Returns the binding for the states to read. In place there is no such binding, because kernels read the pool
  // through the pointer that writes it (states_to_read in shaders/core/slots.h).
  Binding source(const optional<Tensor>& states) const { return parameters.slots != 0 ? Binding() : Binding(states); }
};

struct Checkpoints {
  optional<Tensor> offsets, indices;
  CheckpointParameters parameters{};
};

Checkpoints checkpoints_on(at::Device device, const StatePool& pool, int64_t multiple);

// For more than 32 indices on the device, launches locate_slots.
Slots slots_on(at::Device device, const StatePool& pool);

}  // namespace torch_gdn
