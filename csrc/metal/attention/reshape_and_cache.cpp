#include "ops/attention/reshape_and_cache.h"

#include "metal/attention/slots.h"
#include "metal/implement.h"
#include "shaders/attention/reshape_and_cache.h"

namespace torch_gdn {

namespace {

void run(const ReshapeAndCache<int64_t>& op) {
  if (op.key_cache.numel() + op.value_cache.numel() == 0) return;
  int32_count(op.HK * std::max(op.D, op.DV), "reshape_and_cache_: key", "elements of a token");
  const Tensor key = unit_last_stride(op.key, "key"), value = unit_last_stride(op.value, "value");
  CacheParameters parameters{};
  parameters.key = token_strides(key);
  parameters.value = token_strides(value);
  parameters.slots = slot_parameters(op.slots, "reshape_and_cache_: key_cache");
  parameters.heads = int32_t(op.HK);
  parameters.key_size = int32_t(op.D);
  parameters.value_size = int32_t(op.DV);
  parameters.op = op_name();
  launcher().run(
      {{"attention/reshape_and_cache",
        {key.scalar_type(), op.key_cache.scalar_type(), vector_width({key, value, op.key_cache, op.value_cache})},
        {key, value, op.key_cache, op.value_cache, op.slot_mapping, Binding::error_log(), parameters},
        {op.slots.tokens, 1, 1},
        kCacheThreads}});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<ReshapeAndCache, &run>(m); }

}  // namespace torch_gdn
