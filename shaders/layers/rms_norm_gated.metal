// Computes y = x * rsqrt(mean of x^2 + eps) * weight * silu(gate), or sigmoid(gate). The norm comes before the gate. A
// simdgroup owns one row. Its lanes cover the D elements in turn, `Width` neighbours at a time.
// Registers: a lane's elements, in f32.
// Layout: x and gate [B, T, H, D] with row strides, y contiguous; weight [D].
#include "core/exponential.h"
#include "core/rows.h"
#include "core/vectors.h"
#include "layers/parameters.h"

template <typename T, typename Gate, typename Weight, int D, int Width>
[[kernel]] void rms_norm_gated(
    device const T* x [[buffer(0)]],
    device const Gate* gate [[buffer(1)]],
    device const Weight* weight [[buffer(2)]],
    device T* y [[buffer(3)]],
    constant RmsNormGatedParameters& parameters [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(D >= 1 && D <= kRmsNormGatedLargestRow && D % Width == 0, "D is at most 1024, in whole vectors");
  constexpr int kOwn = (D / Width + 31) / 32;
  const RowIndex at =
      row_index(int64_t(group.x) * kRmsNormGatedRows + simdgroup, parameters.rows, parameters.tokens, parameters.heads);
  device const T* source = x + offset_of(parameters.x, at);
  device const Gate* gates = gate + offset_of(parameters.gate, at);

  Values<Width> values[kOwn];
  float sum = 0.0f;
  UNROLL for (int own = 0; own < kOwn; ++own) {
    const int column = (own * 32 + int(lane)) * Width;
    values[own] = column < D ? load_values<Width>(source + column) : no_values<Width>();
    UNROLL for (int i = 0; i < Width; ++i) sum += values[own].at[i] * values[own].at[i];
  }
  const float scale = rsqrt(simd_sum(sum) / float(D) + parameters.eps);
  UNROLL for (int own = 0; own < kOwn; ++own) {
    const int column = (own * 32 + int(lane)) * Width;
    if (at.is_present && column < D) {
      Values<Width> result = values[own];
      UNROLL for (int i = 0; i < Width; ++i) result.at[i] *= scale;
      if (parameters.round_norm != 0) result = rounded<T, Width>(result);
      if (parameters.has_weight != 0) {
        const Values<Width> factor = load_values<Width>(weight + column);
        UNROLL for (int i = 0; i < Width; ++i) result.at[i] *= factor.at[i];
      }
      if (parameters.round_product != 0) result = rounded<T, Width>(result);
      const Values<Width> logit = load_values<Width>(gates + column);
      UNROLL for (int i = 0; i < Width; ++i) {
        const float sigmoid = 1.0f / (1.0f + gate_exp(-logit.at[i]));
        result.at[i] *= parameters.has_sigmoid != 0 ? sigmoid : logit.at[i] * sigmoid;
      }
      store_values(y + int64_t(at.row) * D + column, result);
    }
  }
}
