// Computes y = h * rsqrt(mean of h^2 + eps) * weight with h = x + residual. Also writes h if there is a residual. A
// threadgroup owns one row. Its threads cover the D elements in turn, `Width` neighbours at a time.
// Registers: a thread's elements of h, in f32.
// Layout: x and residual [B, T, H, D] with row strides; y and h contiguous.
#include "core/rows.h"
#include "core/vectors.h"
#include "layers/parameters.h"
#include "layers/threadgroup_sum.h"

template <typename T, typename Weight, int D, int Width>
[[kernel]] void rms_norm(
    device const T* x [[buffer(0)]],
    device const T* residual [[buffer(1)]],
    device const Weight* weight [[buffer(2)]],
    device T* y [[buffer(3)]],
    device T* residual_out [[buffer(4)]],
    constant RmsNormParameters& parameters [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(D >= 1 && D <= kRmsNormLargestRow && D % Width == 0, "D is at most 16384, in whole vectors");
  constexpr int kThreads = rms_norm_threads(D);
  constexpr int kOwn = (D / Width + kThreads - 1) / kThreads;
  threadgroup float sums[kThreads / 32];
  const RowIndex at = row_index(int64_t(group.x), parameters.rows, parameters.tokens, parameters.heads);
  device const T* source = x + offset_of(parameters.x, at);
  device const T* added = residual + offset_of(parameters.residual, at);
  const int64_t target = int64_t(at.row) * D;

  Values<Width> values[kOwn];
  float squares = 0.0f;
  UNROLL for (int own = 0; own < kOwn; ++own) {
    const int column = (own * kThreads + int(thread_index)) * Width;
    values[own] = column < D ? load_values<Width>(source + column) : no_values<Width>();
    if (parameters.has_residual != 0 && column < D) {
      const Values<Width> other = load_values<Width>(added + column);
      UNROLL for (int i = 0; i < Width; ++i) values[own].at[i] += other.at[i];
      store_values(residual_out + target + column, values[own]);
    }
    UNROLL for (int i = 0; i < Width; ++i) squares += values[own].at[i] * values[own].at[i];
  }
  const float scale = rsqrt(threadgroup_sum<kThreads>(squares, sums, lane, simdgroup) / float(D) + parameters.eps);
  const float offset = parameters.zero_centered != 0 ? 1.0f : 0.0f;
  UNROLL for (int own = 0; own < kOwn; ++own) {
    const int column = (own * kThreads + int(thread_index)) * Width;
    if (column < D) {
      Values<Width> result = values[own];
      UNROLL for (int i = 0; i < Width; ++i) result.at[i] *= scale;
      if (parameters.round_norm != 0) result = rounded<T, Width>(result);
      if (parameters.has_weight != 0) {
        const Values<Width> factor = load_values<Width>(weight + column);
        UNROLL for (int i = 0; i < Width; ++i) result.at[i] *= factor.at[i] + offset;
      }
      store_values(y + target + column, result);
    }
  }
}
