// The slots of a pool as the kernels take them.
#pragma once
#include "common.h"

namespace torch_gdn {

// state_indices and has_initial_state on the device. int32 indices are read as they are: a conversion would be a
// dispatch of its own, and servers keep int32.
struct Slots {
  optional<Tensor> indices, flags;
  SlotParameters parameters{};
};

inline Slots slots_on(at::Device device, const Tensor& state_pool, const optional<Tensor>& state_indices,
                      const optional<Tensor>& has_initial_state, int64_t null_index) {
  TORCH_CHECK_VALUE(state_pool.size(0) <= INT32_MAX, "torch_gdn: state_pool: expected fewer than 2^31 slots, got ",
                    state_pool.size(0));
  Slots slots;
  slots.parameters.slots = int32_t(state_pool.size(0));
  slots.parameters.null_index = int32_t(null_index);
  if (state_indices.has_value()) {
    slots.indices = state_indices->to(device);
    slots.parameters.index_stride = slots.indices->stride(0);
    slots.parameters.index_bytes = int32_t(slots.indices->element_size());
  }
  if (has_initial_state.has_value()) {
    slots.flags = *has_initial_state;
    slots.parameters.flag_stride = slots.flags->stride(0);
    slots.parameters.has_flags = 1;
  }
  return slots;
}

}  // namespace torch_gdn
