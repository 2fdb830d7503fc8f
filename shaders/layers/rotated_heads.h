// Normalises and rotates a head of one token: z = x * rsqrt(mean of x^2 + eps) * weight, or z = x without a norm. Then
//   y[i] = z[i] cos[i] - z[i + P] sin[i],  y[i + P] = z[i + P] cos[i] + z[i] sin[i]   for i < P,
// and y = z from 2 P on.
// A simdgroup owns a head. In a first pass over the row, its lanes add up the squares, `Width` neighbours at a time. A
// second pass reads the row again; in it, a lane takes either a pair of vectors or a vector that is not rotated.
// Registers: two vectors of a lane, in f32.
// Layout: cos and sin [B, T, 1, P] with row strides.
#pragma once
#include "core/rows.h"
#include "core/vectors.h"
#include "layers/parameters.h"

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

  // Writes y. `cosines` and `sines` belong to the token.
  template <typename Angle, typename Y>
  METAL_FUNC void write_rotated(
      device const Angle* cosines, device const Angle* sines, constant Rotation& rotation, int lane, device Y* y)
      const {
    const int D = rotation.D, pairs = rotation.pairs;
    for (int column = lane * Width; column < D - pairs; column += 32 * Width) {
      if (column >= pairs) {
        store_values(y + pairs + column, at(pairs + column));
        continue;
      }
      const Values<Width> first = at(column), second = at(column + pairs);
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

template <int Width, typename T, typename Weight>
METAL_FUNC Head<T, Weight, Width> head_at(
    device const T* x, device const Weight* weight, constant Rotation& rotation, int lane) {
  static_assert(Width == 1 || Width == 4, "a lane takes one element or a vector");
  const bool has_norm = rotation.has_norm != 0;
  const int D = rotation.D;
  const float scale = has_norm ? rsqrt(sum_of_squares<Width>(x, D, lane) / float(D) + rotation.eps) : 1.0f;
  return {x, weight, scale, rotation.zero_centered != 0 ? 1.0f : 0.0f, has_norm};
}
