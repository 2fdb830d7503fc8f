#pragma once
#include "metal/parameters.h"
#include "ops/slots.h"

namespace torch_gdn {

// On the device. int32 indices, which servers keep, are not converted: that would cost a dispatch.
struct Slots {
  optional<Tensor> indices, flags, accepted;
  SlotParameters parameters{};
};

// Launches locate_slots for more than 32 indices on the device.
Slots slots_on(at::Device device, const StatePool& pool);

}  // namespace torch_gdn
