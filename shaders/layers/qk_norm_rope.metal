// Normalises and rotates each head of q and k, as rotated_heads.h describes. A simdgroup owns one head of one token.
// The heads of q come first, then those of k.
// Layout: q and k [B, T, H, D] with row strides.
#include "layers/parameters.h"
#include "layers/rotated_heads.h"

template <typename T, typename Weight, typename Angle, int Width>
[[kernel]] void qk_norm_rope(
    device const T* q [[buffer(0)]],
    device const T* k [[buffer(1)]],
    device const Angle* cos [[buffer(2)]],
    device const Angle* sin [[buffer(3)]],
    device const Weight* q_weight [[buffer(4)]],
    device const Weight* k_weight [[buffer(5)]],
    device T* q_out [[buffer(6)]],
    device T* k_out [[buffer(7)]],
    constant QkNormRopeParameters& parameters [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  RowIndex at =
      row_index(int64_t(group.x) * kRotatedRows + simdgroup, parameters.rows, parameters.tokens, parameters.heads);
  const bool is_q = at.head < parameters.q_heads;
  if (!is_q) at.head -= parameters.q_heads;
  const Head<T, Weight, Width> head = head_at<Width>(
      is_q ? q + offset_of(parameters.q, at) : k + offset_of(parameters.k, at), is_q ? q_weight : k_weight,
      parameters.rotation, int(lane));
  if (!at.is_present) return;
  device T* y = is_q ? q_out + offset_of(parameters.q_out, at) : k_out + offset_of(parameters.k_out, at);
  at.head = 0;
  head.write_rotated(
      cos + offset_of(parameters.rotation.cos, at), sin + offset_of(parameters.rotation.sin, at), parameters.rotation,
      int(lane), y);
}
