#include "metal/slots.h"

#include <ATen/ops/empty.h>

#include "shaders/core/parameters.h"

namespace torch_gdn {

namespace {

// With at most as many indices as a simdgroup has lanes, every threadgroup searches for duplicates itself.
constexpr int64_t kSearchedByEach = 32;

Tensor located(const Tensor& indices, const SlotParameters& parameters) {
  constexpr int64_t kSimdgroups = 4;
  const int64_t count = indices.numel();
  const auto result = at::empty({count}, indices.options().dtype(at::kInt));
  launcher().run(
      {{"core/locate_slots",
        {kSimdgroups},
        {indices, result, Binding::error_log(), LocateSlotsParameters{parameters, int32_t(count), op_name()}},
        {ceil_div(count, kSimdgroups), 1, 1},
        32 * kSimdgroups}});
  return result;
}

}  // namespace

Checkpoints checkpoints_on(at::Device device, const StatePool& pool, int64_t multiple) {
  if (!pool.checkpoint_offsets.has_value()) return {};
  Checkpoints checkpoints{index_array(device, *pool.checkpoint_offsets), index_array(device, *pool.checkpoint_indices)};
  const auto& [offsets, indices, _] = checkpoints;
  checkpoints.parameters = {
      offsets->stride(0),       indices->stride(0), int32_t(offsets->element_size()), int32_t(indices->element_size()),
      int32_t(pool.null_index), int32_t(multiple)};
  return checkpoints;
}

Slots slots_on(at::Device device, const StatePool& pool) {
  TORCH_CHECK_VALUE(pool.states.size(0) <= INT32_MAX, "torch_gdn: state_pool: expected fewer than 2^31 slots, got ",
                    pool.states.size(0));
  Slots slots;
  auto& parameters = slots.parameters;
  parameters.slots = int32_t(pool.states.size(0));
  parameters.null_index = int32_t(pool.null_index);
  if (pool.indices.has_value()) {
    slots.indices = index_array(device, *pool.indices);
    parameters.index_stride = slots.indices->stride(-1);
    parameters.index_bytes = int32_t(slots.indices->element_size());
    if (pool.has_slot_per_token()) {
      parameters.columns = int32_t(slots.indices->size(1));
      const int64_t row = parameters.columns * parameters.index_stride;
      parameters.row_gap = parameters.columns > 0 ? slots.indices->stride(0) - row : 0;
    }
    parameters.is_checked = pool.indices->is_cpu();  // by check_state_indices()
    if (!parameters.is_checked && slots.indices->numel() > kSearchedByEach) {
      slots.indices = located(*slots.indices, parameters);
      parameters.index_stride = 1;
      parameters.row_gap = 0;
      parameters.index_bytes = 4;
      parameters.null_index = -1;
      parameters.is_checked = 1;
    }
  }
  if (pool.has_initial_state.has_value()) {
    slots.flags = *pool.has_initial_state;
    parameters.flag_stride = slots.flags->stride(0);
    parameters.has_flags = 1;
  }
  if (pool.num_accepted_tokens.has_value()) {
    slots.accepted = index_array(device, *pool.num_accepted_tokens);
    parameters.accepted_stride = slots.accepted->stride(0);
    parameters.accepted_bytes = int32_t(slots.accepted->element_size());
  }
  return slots;
}

}  // namespace torch_gdn
