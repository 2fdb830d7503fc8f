// One simdgroup owns one row; its lanes cover the D elements in turn, `Packet` neighbours at a time. In registers: a
// lane's elements, in f32. Layout: x, gate [B, T, H, D] with row strides, y the same, contiguous; weight [D].
// y = x * rsqrt(mean of x^2 + eps) * weight * silu(gate), or sigmoid(gate): the norm comes before the gate.
#include "core/exponential.h"
#include "core/packet.h"
#include "core/parameters.h"

template <typename T, int Packet>
METAL_FUNC Values<Packet> rounded(Values<Packet> values) {
  UNROLL for (int i = 0; i < Packet; ++i) values.at[i] = float(T(values.at[i]));
  return values;
}

template <typename T, typename G, typename P, int D, int Packet>
[[kernel]] void rms_norm_gated(
    device const T* x [[buffer(0)]],
    device const G* gate [[buffer(1)]],
    device const P* weight [[buffer(2)]],
    device T* y [[buffer(3)]],
    constant RmsNormGatedParameters& parameters [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(D >= 1 && D <= 1024 && D % Packet == 0, "D is at most 1024, in whole packets");
  constexpr int kOwn = (D / Packet + 31) / 32;
  const int64_t row = int64_t(group.x) * 4 + simdgroup;
  const bool is_present = row < parameters.rows;
  const int64_t head = row % parameters.heads;
  const int64_t token = row / parameters.heads % parameters.tokens;
  const int64_t batch = row / parameters.heads / parameters.tokens;
  device const T* source = x + batch * parameters.x.batch + token * parameters.x.token + head * parameters.x.head;
  device const G* gates =
      gate + batch * parameters.gate.batch + token * parameters.gate.token + head * parameters.gate.head;

  Values<Packet> values[kOwn];
  float sum = 0.0f;
  UNROLL for (int own = 0; own < kOwn; ++own) {
    const int column = (own * 32 + int(lane)) * Packet;
    values[own] = is_present && column < D ? load_values<Packet>(source + column) : no_values<Packet>();
    UNROLL for (int i = 0; i < Packet; ++i) sum += values[own].at[i] * values[own].at[i];
  }
  const float scale = rsqrt(simd_sum(sum) / float(D) + parameters.eps);
  UNROLL for (int own = 0; own < kOwn; ++own) {
    const int column = (own * 32 + int(lane)) * Packet;
    if (is_present && column < D) {
      Values<Packet> result = values[own];
      UNROLL for (int i = 0; i < Packet; ++i) result.at[i] *= scale;
      if (parameters.round_norm != 0) result = rounded<T, Packet>(result);
      if (parameters.has_weight != 0) {
        const Values<Packet> factor = load_values<Packet>(weight + column);
        UNROLL for (int i = 0; i < Packet; ++i) result.at[i] *= factor.at[i];
      }
      if (parameters.round_product != 0) result = rounded<T, Packet>(result);
      const Values<Packet> opening = load_values<Packet>(gates + column);
      UNROLL for (int i = 0; i < Packet; ++i) {
        const float sigmoid = 1.0f / (1.0f + gate_exp(-opening.at[i]));
        result.at[i] *= parameters.has_sigmoid != 0 ? sigmoid : opening.at[i] * sigmoid;
      }
      store_values(y + row * D + column, result);
    }
  }
}
