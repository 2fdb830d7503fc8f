// Each head of q and k: z = x * rsqrt(mean of x^2 + eps) * weight, or z = x without a norm. Then for i < P
//   y[i] = z[i] cos[i] - z[i + P] sin[i],  y[i + P] = z[i + P] cos[i] + z[i] sin[i],
// and y = z from 2 P on.
// A simdgroup owns one head of one token: of q's heads first, then of k's. In a first pass over the row its lanes add
// up the squares, `Width` neighbours at a time. In a second pass, which reads the row again, a lane takes a pair of
// vectors or a vector that is not rotated.
// Registers: two vectors of a lane, in f32. Layout: q, k [B, T, H, D] and cos, sin [B, T, 1, P] with row strides.
#include "core/rows.h"
#include "core/vectors.h"
#include "layers/qk_norm_rope.h"

// A head before its rotation.
template <typename T, typename Weight, int Width>
struct Head {
  device const T* x;
  device const Weight* weight;
  float scale, offset;  // the offset is added to the weight
  bool has_norm;

  METAL_FUNC Values<Width> at(int column) const {
    Values<Width> values = load_values<Width>(x + column);
    if (has_norm) {
      const Values<Width> factor = load_values<Width>(weight + column);
      UNROLL for (int i = 0; i < Width; ++i) values.at[i] *= scale * (factor.at[i] + offset);
    }
    return values;
  }
};

template <int Width, typename T>
METAL_FUNC float sum_of_squares(device const T* x, int D, int lane) {
  float squares = 0.0f;
  for (int column = lane * Width; column < D; column += 32 * Width) {
    const Values<Width> values = load_values<Width>(x + column);
    UNROLL for (int i = 0; i < Width; ++i) squares += values.at[i] * values.at[i];
  }
  return simd_sum(squares);
}

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
  static_assert(Width == 1 || Width == 4, "a lane takes one element or a vector");
  RowIndex at =
      row_index(int64_t(group.x) * kQkNormRopeRows + simdgroup, parameters.rows, parameters.tokens, parameters.heads);
  const bool is_q = at.head < parameters.q_heads;
  if (!is_q) at.head -= parameters.q_heads;
  const int D = parameters.D, pairs = parameters.pairs;
  Head<T, Weight, Width> head;
  head.x = is_q ? q + offset_of(parameters.x, at) : k + offset_of(parameters.k, at);
  head.weight = is_q ? q_weight : k_weight;
  head.has_norm = parameters.has_norm != 0;
  head.offset = parameters.zero_centered != 0 ? 1.0f : 0.0f;
  head.scale = head.has_norm ? rsqrt(sum_of_squares<Width>(head.x, D, int(lane)) / float(D) + parameters.eps) : 1.0f;
  if (!at.is_present) return;

  device T* y = is_q ? q_out + offset_of(parameters.q_out, at) : k_out + offset_of(parameters.k_out, at);
  at.head = 0;
  device const Angle* cosines = cos + offset_of(parameters.cos, at);
  device const Angle* sines = sin + offset_of(parameters.sin, at);
  for (int column = int(lane) * Width; column < D - pairs; column += 32 * Width) {
    if (column >= pairs) {
      store_values(y + pairs + column, head.at(pairs + column));
      continue;
    }
    const Values<Width> first = head.at(column), second = head.at(column + pairs);
    const Values<Width> c = load_values<Width>(cosines + column), s = load_values<Width>(sines + column);
    Values<Width> low, high;
    UNROLL for (int i = 0; i < Width; ++i) {
      low.at[i] = first.at[i] * c.at[i] - second.at[i] * s.at[i];
      high.at[i] = second.at[i] * c.at[i] + first.at[i] * s.at[i];
    }
    store_values(y + column, low);
    store_values(y + pairs + column, high);
  }
}
