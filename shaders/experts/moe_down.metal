// y = the weighted sum of each token's products hidden W_down, plus its residual, for up to 8 tokens.
// A threadgroup owns kDownRows rows of every expert. It takes the experts one after another, each with all its pairs.
// A simdgroup owns 4 of the rows. Threadgroup memory holds the products, [pairs + tokens, kDownRows], which the
// threadgroup adds up at the end.
//
// Layout: hidden [T, k, I], shared_hidden [T, IS], w_down [E, D, I] and shared [D, IS] with strides; residual and y
// [T, D].
#include "experts/few_tokens.h"
#include "experts/moe_down.h"
#include "experts/weighted_sum.h"

// The pairs, and tokens of the shared expert, that the kernel for `Most` tokens takes.
template <int Most>
METAL_FUNC constexpr int most_products() {
  return (Most == 1 ? 32 : kFewPairs) + Most;
}

struct StagedProducts {
  threadgroup const float* column;
  METAL_FUNC float at(int64_t pair) const { return column[pair * kDownRows]; }
};

// Multiplies and keeps the products. Lane row * Count + v of a simdgroup holds the product of that row and vector v.
template <int Count, int Most, typename T, typename Matrices>
METAL_FUNC void multiply_and_keep(
    threadgroup float* products,
    int offset,
    threadgroup T* staged,
    thread const Matrices& weights,
    thread const VectorRows<T>& vectors,
    thread const PairGroup<Most>& own,
    int columns,
    uint thread_index,
    uint lane) {
  constexpr int kValues = kRowsOfHalf * Count;  // per half
  float sums[2 * kValues];
  multiply_vectors<Count, Most, kDownSimdgroups * 32, 1>(
      sums, staged, weights, vectors, own, columns, 0, thread_index, lane);
  const float upper = reduce_to_lanes<kValues>(sums, lane);
  const float lower = reduce_to_lanes<kValues>(sums + kValues, lane);
  const int v = int(lane) % Count;
  int pair = own.pairs[0];
  UNROLL for (int i = 1; i < Count; ++i) pair = v == i ? own.pairs[i] : pair;
  if (int(lane) < kValues && v < own.count) {
    threadgroup float* own_products = products + (pair + offset) * kDownRows + int(lane) / Count;
    own_products[0] = upper;
    own_products[kRowsOfHalf] = lower;
  }
}

template <int Most, typename T, int Bits, int Width>
METAL_FUNC void products_of(
    threadgroup float* products,
    int offset,
    threadgroup T* staged,
    thread const TwoMatrices<kRowsOfHalf, T, Bits, Width>& weights,
    thread const VectorRows<T>& vectors,
    thread const PairGroup<Most>& own,
    int columns,
    uint thread_index,
    uint lane) {
  if (own.count == 1) {
    multiply_and_keep<1>(products, offset, staged, weights, vectors, own, columns, thread_index, lane);
  } else if constexpr (Most > 1) {
    multiply_and_keep<Most>(products, offset, staged, weights, vectors, own, columns, thread_index, lane);
  }
}

template <typename T, int Most, int Width, int Bits = 0, int SharedBits = 0>
[[kernel]] void moe_down(
    device const T* hidden [[buffer(0)]],
    device const uchar* w_down [[buffer(1)]],
    device const uchar* w_scales [[buffer(2)]],
    device const uchar* w_biases [[buffer(3)]],
    device const uchar* topk_weights [[buffer(4)]],
    device const int* topk_ids [[buffer(5)]],
    device const T* shared_hidden [[buffer(6)]],
    device const uchar* shared_down_proj [[buffer(7)]],
    device const uchar* shared_scales [[buffer(8)]],
    device const uchar* shared_biases [[buffer(9)]],
    device const uchar* shared_gate [[buffer(10)]],
    device const T* residual [[buffer(11)]],
    device T* y [[buffer(12)]],
    device ErrorLog* errors [[buffer(13)]],
    constant MoeDownParameters& parameters [[buffer(14)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int kThreads = kDownSimdgroups * 32;
  alignas(16) threadgroup T staged[Most * staged_columns<T, Most>()];
  threadgroup float products[most_products<Most>() * kDownRows];
  constant PairParameters& pairs = parameters.pairs;
  const int count = pairs.count;
  const int first = int(group.x) * kDownRows;
  const int own_row = int(simdgroup) * 2 * kRowsOfHalf;
  const int row = min(first + own_row, parameters.D - 1);
  const int next_row = min(row + kRowsOfHalf, parameters.D - 1);

  FewPairs few;
  few.load(topk_ids, pairs, lane);
  PairGroup<Most> own;
  VectorRows<T> vectors;
  vectors.divisor = 1;
  vectors.data = hidden;
  vectors.stride = parameters.I;
  for (int pair = 0; pair < count; ++pair) {
    const int expert = expert_of_pair(topk_ids, pairs, pair);
    if (expert == kLeftOut && first == 0 && thread_index == 0) report_pair(topk_ids, pairs, pair, errors);
    own.take(few, expert, pair, lane);
    if (own.count == 0) continue;
    TwoMatrices<kRowsOfHalf, T, Bits, Width> weights;
    weights.first =
        rows_of<T, Bits, Width>(w_down, w_scales, w_biases, parameters.experts, expert, row, parameters.D - row);
    weights.second = rows_of<T, Bits, Width>(
        w_down, w_scales, w_biases, parameters.experts, expert, next_row, parameters.D - next_row);
    products_of<Most>(products + own_row, 0, staged, weights, vectors, own, parameters.I, thread_index, lane);
  }
  if (parameters.IS > 0) {
    own.take_tokens(pairs.tokens);
    vectors.data = shared_hidden;
    vectors.stride = parameters.IS;
    TwoMatrices<kRowsOfHalf, T, SharedBits, Width> weights;
    weights.first = rows_of<T, SharedBits, Width>(
        shared_down_proj, shared_scales, shared_biases, parameters.shared, 0, row, parameters.D - row);
    weights.second = rows_of<T, SharedBits, Width>(
        shared_down_proj, shared_scales, shared_biases, parameters.shared, 0, next_row, parameters.D - next_row);
    products_of<Most>(products + own_row, count, staged, weights, vectors, own, parameters.IS, thread_index, lane);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int item = int(thread_index); item < pairs.tokens * kDownRows; item += kThreads) {
    const int token = item / kDownRows;
    const int column = item % kDownRows;
    StagedProducts staged_products;
    staged_products.column = products + column;
    if (first + column < parameters.D) {
      const float sum = weighted_sum(staged_products, topk_ids, topk_weights, shared_gate, parameters, token);
      store_sum(y, residual, parameters, int64_t(token) * parameters.D + first + column, sum);
    }
  }
}
