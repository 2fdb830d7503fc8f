// One threadgroup owns a token: its key and its value, head by head, go to the token's slot. A thread copies Width
// elements at a time. Layout: key [T, H, D], value [T, H, DV], caches [blocks, block_size, H, D] and [.., DV], all with
// strides; slot_mapping of 4 or 8 bytes.
#include "attention/reshape_and_cache.h"
#include "core/error.h"
#include "core/indices.h"
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
  const int64_t token = group.x;
  const int64_t slot = read_index(slot_mapping, token * parameters.slot_stride, parameters.slot_bytes);
  const bool is_outside = slot >= parameters.capacity;
  if (is_outside && thread_index == 0) {
    report_error(
        errors, parameters.op, "slot_mapping: expected slots below the cache's size, got ", slot, token, __LINE__);
  }
  if (slot < 0 || is_outside) return;
  const int block = int(slot) / parameters.block_size;
  const int offset = int(slot) % parameters.block_size;
  copy_heads<Width>(
      key_cache + block * parameters.key_cache.block + offset * parameters.key_cache.token,
      key + token * parameters.key.token, parameters.key_cache.head, parameters.key.head, parameters.heads,
      parameters.key_size, thread_index);
  copy_heads<Width>(
      value_cache + block * parameters.value_cache.block + offset * parameters.value_cache.token,
      value + token * parameters.value.token, parameters.value_cache.head, parameters.value.head, parameters.heads,
      parameters.value_size, thread_index);
}
