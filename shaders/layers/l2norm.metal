// y = x * rsqrt(sum of x^2 + eps), as FLA's l2norm_fwd.
// A simdgroup owns one row; its lanes cover the D elements in turn. Registers: a lane's elements, in f32.
// Layout: x [B, T, H, D] with row strides, y contiguous.
#include "core/fragment.h"
#include "core/rows.h"
#include "layers/l2norm.h"

template <typename T, int D>
[[kernel]] void l2norm(
    device const T* x [[buffer(0)]],
    device T* y [[buffer(1)]],
    constant L2NormParameters& parameters [[buffer(2)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(D >= 1 && D <= kL2NormLargestRow, "D is at most 1024");
  constexpr int kOwn = (D + 31) / 32;
  const RowIndex at =
      row_index(int64_t(group.x) * kL2NormRows + simdgroup, parameters.rows, parameters.tokens, parameters.heads);
  device const T* source = x + offset_of(parameters.x, at);
  device T* target = y + int64_t(at.row) * D;

  float values[kOwn];
  float sum = 0.0f;
  UNROLL for (int own = 0; own < kOwn; ++own) {
    const int column = own * 32 + int(lane);
    values[own] = column < D ? float(source[column]) : 0.0f;
    sum += values[own] * values[own];
  }
  const float scale = rsqrt(simd_sum(sum) + parameters.eps);
  UNROLL for (int own = 0; own < kOwn; ++own) {
    const int column = own * 32 + int(lane);
    if (at.is_present && column < D) target[column] = T(values[own] * scale);
  }
}
