// The slots of a pool as the kernels take them.
#pragma once
#include "metal/parameters.h"
#include "ops/slots.h"

namespace torch_gdn {

// state_indices and has_initial_state on the device. int32 indices are read as they are: a conversion would be a
// dispatch of its own, and servers keep int32.
struct Slots {
  optional<Tensor> indices, flags;
  SlotParameters parameters{};
};

// More than 32 indices on the device are looked through by a kernel of its own, which this launches.
Slots slots_on(at::Device device, const StatePool& pool);

}  // namespace torch_gdn
