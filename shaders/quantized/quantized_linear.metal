// y = x W^T + bias for up to 8 rows of x. A threadgroup owns kLinearRows rows of W, and a simdgroup 8 of them. In
// registers: a sum for each of these rows and each row of x.
// Layout: x [M, K] and packed W [N, K] with strides, bias [N]; y [M, N].
#include "experts/few_tokens.h"
#include "quantized/bias.h"
#include "quantized/quantized_linear.h"

// Lane l stores the simdgroup's row l % 8 for rows l / 8, l / 8 + 4 of x.
template <int Count, int Most, typename T>
METAL_FUNC void store_sums(
    device T* y,
    device const uchar* bias,
    constant QuantizedLinearParameters& parameters,
    int row,
    thread const float* sums,
    thread const PairGroup<Most>& own,
    uint lane) {
  constexpr int kRows = 2 * kRowsOfHalf;
  const int own_row = row + int(lane) % kRows;
  const float added = own_row < parameters.N ? bias_at(bias, parameters, own_row) : 0.0f;
  UNROLL for (int base = 0; base < Count; base += 4) {
    float value = 0.0f;
    UNROLL for (int i = 0; i < kRows * min(Count, 4); ++i) {
      value = int(lane) == i ? sums[i % kRows * Count + base + i / kRows] : value;
    }
    const int v = base + int(lane) / kRows;
    if (v < min(Count, own.count) && own_row < parameters.N) y[int64_t(v) * parameters.N + own_row] = T(value + added);
  }
}

template <typename T, int Most, int Width, int Bits>
[[kernel]] void quantized_linear(
    device const T* x [[buffer(0)]],
    device const uchar* weight [[buffer(1)]],
    device const uchar* scales [[buffer(2)]],
    device const uchar* biases [[buffer(3)]],
    device const uchar* bias [[buffer(4)]],
    device T* y [[buffer(5)]],
    constant QuantizedLinearParameters& parameters [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int kThreads = kLinearSimdgroups * 32;
  alignas(16) threadgroup T staged[Most * staged_columns<T, Most>()];
  const int row = int(group.x) * kLinearRows + int(simdgroup) * 2 * kRowsOfHalf;
  const int first = min(row, parameters.N - 1);
  const int second = min(row + kRowsOfHalf, parameters.N - 1);
  const Weights<T, Bits, Width> upper =
      rows_of<T, Bits, Width>(weight, scales, biases, parameters.weight, 0, first, parameters.N - first);
  const Weights<T, Bits, Width> lower =
      rows_of<T, Bits, Width>(weight, scales, biases, parameters.weight, 0, second, parameters.N - second);
  PairGroup<Most> own;
  own.take_tokens(parameters.M);
  VectorRows<T> vectors;
  vectors.data = x;
  vectors.stride = parameters.x_stride;
  vectors.divisor = 1;
  float sums[2 * kRowsOfHalf * Most];
  multiply_vectors<Most, Most, kThreads>(sums, staged, upper, lower, vectors, own, parameters.K, thread_index, lane);
  store_sums<Most>(y, bias, parameters, row, sums, own, lane);
}
