// One threadgroup owns a token. It copies the token's key and value, head by head, to the token's slot. A thread copies
// Width elements at a time.
// Layout: key [T, H, D], value [T, H, DV], caches [blocks, block_size, H, D] and [.., DV], all with strides;
// slot_mapping of 4 or 8 bytes.
#include "attention/parameters.h"
#include "attention/slots.h"
#include "core/vectors.h"

template <int Width, typename T, typename C>
METAL_FUNC void copy_heads(
    device C* target,
    device const T* source,
    int64_t target_head,
    int64_t source_head,
    int heads,
    int size,
    uint thread_index) {
  const int vectors = size / Width;
  for (int item = int(thread_index); item < heads * vectors; item += kCacheThreads) {
    const int head = item / vectors;
    const int64_t column = int64_t(item % vectors) * Width;
    store_values(target + head * target_head + column, load_values<Width>(source + head * source_head + column));
  }
}

template <typename T, typename C, int Width>
[[kernel]] void reshape_and_cache(
    device const T* key [[buffer(0)]],
    device const T* value [[buffer(1)]],
    device C* key_cache [[buffer(2)]],
    device C* value_cache [[buffer(3)]],
    device const int* slot_mapping [[buffer(4)]],
    device ErrorLog* errors [[buffer(5)]],
    constant CacheParameters& parameters [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const int token = int(group.x);
  const int slot = slot_of(slot_mapping, token, parameters.slots, thread_index == 0, errors, parameters.op);
  if (slot < 0) return;
  constant CacheSlotParameters& slots = parameters.slots;
  copy_heads<Width>(
      key_cache + offset_of(slots.key, slot, slots.block_size), key + token * parameters.key.token, slots.key.head,
      parameters.key.head, parameters.heads, parameters.key_size, thread_index);
  copy_heads<Width>(
      value_cache + offset_of(slots.value, slot, slots.block_size), value + token * parameters.value.token,
      slots.value.head, parameters.value.head, parameters.heads, parameters.value_size, thread_index);
}
