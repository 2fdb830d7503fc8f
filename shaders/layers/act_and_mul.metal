// Computes y = silu(gate) * up, or y = sigmoid(gate) * up.
// A thread owns `Width` neighbours of one row. A threadgroup owns a part of a row.
// Layout: gate and up [B, T, H, D] with row strides, y contiguous.
#include "core/exponential.h"
#include "core/rows.h"
#include "core/vectors.h"
#include "layers/parameters.h"

template <typename T, int Width>
[[kernel]] void act_and_mul(
    device const T* gate [[buffer(0)]],
    device const T* up [[buffer(1)]],
    device T* y [[buffer(2)]],
    constant ActAndMulParameters& parameters [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  static_assert(Width == 1 || Width == 4, "a thread takes one element or a vector");
  static_assert(kActAndMulMostThreads % 32 == 0, "a threadgroup has whole simdgroups");
  const RowIndex at = row_index(int64_t(group.x), parameters.rows, parameters.tokens, parameters.heads);
  const int64_t column = (int64_t(group.y) * parameters.threads + thread_index) * Width;
  if (column >= parameters.D) return;
  const Values<Width> logit = load_values<Width>(gate + offset_of(parameters.x, at) + column);
  Values<Width> result = load_values<Width>(up + offset_of(parameters.up, at) + column);
  UNROLL for (int i = 0; i < Width; ++i) {
    const float sigmoid = 1.0f / (1.0f + gate_exp(-logit.at[i]));
    result.at[i] *= parameters.has_sigmoid != 0 ? sigmoid : logit.at[i] * sigmoid;
  }
  store_values(y + int64_t(at.row) * parameters.D + column, result);
}
