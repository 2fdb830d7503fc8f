#pragma once
#include "metal/attention/pages.h"
#include "ops/attention/reshape_and_cache.h"

namespace torch_gdn {

// `argument` is its name in errors.
inline CacheSlotParameters slot_parameters(const CacheSlots<int64_t>& slots, const char* argument) {
  CacheSlotParameters parameters{};
  parameters.stride = slots.slot_mapping.stride(0);
  parameters.bytes = int32_t(slots.slot_mapping.element_size());
  parameters.tokens = int32_t(slots.tokens);
  parameters.capacity = int32_count(slots.blocks * slots.block_size, argument, "slots");
  parameters.block_size = int32_t(slots.block_size);
  parameters.key = page_strides(slots.key_cache);
  parameters.value = page_strides(slots.value_cache);
  return parameters;
}

}  // namespace torch_gdn
