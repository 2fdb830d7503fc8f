// Computes y = x W^T + bias for up to 8 rows of x. A threadgroup owns kLinearRows rows of W, and a simdgroup owns 4 of
// them. Registers: a sum for each of a simdgroup's rows and each row of x.
// Layout: x [M, K] and packed W [N, K] with strides, bias [N]; y [M, N].
#include "experts/few_tokens.h"
#include "quantized/bias.h"
#include "quantized/parameters.h"

// Presents the rows of x to multiply_vectors in the way that it takes the pairs of an expert.
struct RowsInTurn {
  int next;
  METAL_FUNC int take_first() { return next++; }
};
struct AllRows {
  RowsInTurn pairs;
  int count;
};

template <typename T, int Most, int Width, int Bits>
[[kernel, max_total_threads_per_threadgroup(kLinearSimdgroups * 32)]] void quantized_linear(
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
  constexpr int kRows = 2 * kRowsOfHalf;  // per simdgroup
  alignas(16) threadgroup T staged[Most * staged_columns<T, Most>()];
  const int row = int(group.x) * kLinearRows + int(simdgroup) * kRows;
  const int first = min(row, parameters.N - 1);
  const int second = min(row + kRowsOfHalf, parameters.N - 1);
  const TwoMatrices<kRowsOfHalf, T, Bits, Width> weights{
      rows_of<T, Bits, Width>({weight, scales, biases, &parameters.weight}, 0, first, parameters.N - first),
      rows_of<T, Bits, Width>({weight, scales, biases, &parameters.weight}, 0, second, parameters.N - second)};
  const AllRows own{{0}, parameters.M};
  const VectorRows<T> vectors{x, parameters.x_stride, 1};
  float sums[kRows * Most];
  multiply_vectors<Most, kThreads>(sums, staged, weights, vectors, own, parameters.K, thread_index, lane);

  // Lane l holds the sum of row l / Most of the simdgroup's rows and row l % Most of x.
  const float sum = reduce_to_lanes<kRows * Most>(sums, lane);
  const int own_row = row + int(lane) / Most;
  const int v = int(lane) % Most;
  if (int(lane) >= kRows * Most || v >= own.count || own_row >= parameters.N) return;
  y[int64_t(v) * parameters.N + own_row] = T(sum + bias_at(bias, parameters, own_row));
}
