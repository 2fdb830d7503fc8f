// Normalises and rotates each head of q and k, as rotated_heads.h describes. The heads of k go to the token's slot in
// the cache. The heads of v are copied there. A simdgroup owns one head of one token. The heads of q come first, then
// those of k, then those of v.
// Layout: q, k and v [B, T, H, D] with row strides; caches [blocks, block_size, HK, D] with strides; slot_mapping of 4
// or 8 bytes.
#include "attention/parameters.h"
#include "attention/slots.h"
#include "layers/rotated_heads.h"

template <typename T, typename C, typename Weight, typename Angle, int Width>
[[kernel]] void qk_norm_rope_and_cache(
    device const T* q [[buffer(0)]],
    device const T* k [[buffer(1)]],
    device const T* v [[buffer(2)]],
    device const Angle* cos [[buffer(3)]],
    device const Angle* sin [[buffer(4)]],
    device const Weight* q_weight [[buffer(5)]],
    device const Weight* k_weight [[buffer(6)]],
    device T* q_out [[buffer(7)]],
    device C* key_cache [[buffer(8)]],
    device C* value_cache [[buffer(9)]],
    device const int* slot_mapping [[buffer(10)]],
    device ErrorLog* errors [[buffer(11)]],
    constant QkNormRopeAndCacheParameters& parameters [[buffer(12)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane_index [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const int lane = int(lane_index);
  constant Rotation& rotation = parameters.rotation;
  RowIndex at =
      row_index(int64_t(group.x) * kRotatedRows + simdgroup, parameters.rows, parameters.tokens, parameters.heads);
  if (!at.is_present) return;
  const RowIndex token{at.row, at.batch, at.token, 0, true};
  device const Angle* cosines = cos + offset_of(rotation.cos, token);
  device const Angle* sines = sin + offset_of(rotation.sin, token);
  if (at.head < parameters.q_heads) {
    const Head<T, Weight, Width> head = head_at<Width>(q + offset_of(parameters.q, at), q_weight, rotation, lane);
    head.write_rotated(cosines, sines, rotation, lane, q_out + offset_of(parameters.q_out, at));
    return;
  }

  constant CacheSlotParameters& slots = parameters.slots;
  at.head -= parameters.q_heads;
  const bool reports = at.head == 0 && lane == 0;
  const int slot = slot_of(slot_mapping, at.row / parameters.heads, slots, reports, errors, parameters.op);
  if (slot < 0) return;
  if (at.head < parameters.kv_heads) {
    const Head<T, Weight, Width> head = head_at<Width>(k + offset_of(parameters.k, at), k_weight, rotation, lane);
    device C* y = key_cache + offset_of(slots.key, slot, slots.block_size) + at.head * slots.key.head;
    head.write_rotated(cosines, sines, rotation, lane, y);
    return;
  }
  at.head -= parameters.kv_heads;
  device const T* x = v + offset_of(parameters.v, at);
  device C* y = value_cache + offset_of(slots.value, slot, slots.block_size) + at.head * slots.value.head;
  for (int column = lane * Width; column < parameters.value_size; column += 32 * Width) {
    store_values(y + column, load_values<Width>(x + column));
  }
}
