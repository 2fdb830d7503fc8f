// y = x W^T + bias for up to 8 rows of x. A threadgroup owns LinearPlan's rows of W; the simdgroups that share rows
// take turns at their columns, and the first of them adds up the sums. In registers: a sum for each of a simdgroup's
// rows and each row of x.
// Layout: x [M, K] and packed W [N, K] with strides, bias [N]; y [M, N].
#include "experts/few_tokens.h"
#include "quantized/bias.h"
#include "quantized/quantized_linear.h"

template <typename T, int Most, int Width, int Bits>
[[kernel, max_total_threads_per_threadgroup(LinearPlan<Most>::kSimdgroups * 32)]] void quantized_linear(
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
  typedef LinearPlan<Most> Plan;
  constexpr int kThreads = Plan::kSimdgroups * 32;
  constexpr int kRows = 2 * kRowsOfHalf;  // per simdgroup
  alignas(16) threadgroup T staged[Most * staged_columns<T, Most>()];
  threadgroup float sums_of_parts[kThreads];
  const int part = int(simdgroup) % Plan::kParts;
  const int row = int(group.x) * Plan::kRows + int(simdgroup) / Plan::kParts * kRows;
  const int first = min(row, parameters.N - 1);
  const int second = min(row + kRowsOfHalf, parameters.N - 1);
  TwoMatrices<kRowsOfHalf, T, Bits, Width> weights;
  weights.first = rows_of<T, Bits, Width>(weight, scales, biases, parameters.weight, 0, first, parameters.N - first);
  weights.second = rows_of<T, Bits, Width>(weight, scales, biases, parameters.weight, 0, second, parameters.N - second);
  PairGroup<Most> own;
  own.take_tokens(parameters.M);
  VectorRows<T> vectors;
  vectors.data = x;
  vectors.stride = parameters.x_stride;
  vectors.divisor = 1;
  float sums[kRows * Most];
  multiply_vectors<Most, Most, kThreads, Plan::kParts>(
      sums, staged, weights, vectors, own, parameters.K, part, thread_index, lane);

  // Lane l holds row l / Most of the simdgroup's rows, for row l % Most of x.
  sums_of_parts[thread_index] = reduce_to_lanes<kRows * Most>(sums, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int own_row = row + int(lane) / Most;
  const int v = int(lane) % Most;
  if (part != 0 || int(lane) >= kRows * Most || v >= own.count || own_row >= parameters.N) return;
  float value = bias_at(bias, parameters, own_row);
  UNROLL for (int i = 0; i < Plan::kParts; ++i) value += sums_of_parts[int(thread_index) + i * 32];
  y[int64_t(v) * parameters.N + own_row] = T(value);
}
