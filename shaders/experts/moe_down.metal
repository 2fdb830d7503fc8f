// Computes y, the weighted sum of each token's products hidden W_down plus its residual, for up to 8 tokens.
// A threadgroup owns DownPlan's rows of every expert. Its simdgroups take turns at the pairs. The simdgroup of the
// first pair of an expert processes all pairs of that expert. The last simdgroup processes the shared expert. The lanes
// of a simdgroup form groups; the lanes of a group share the columns of its rows. Registers hold a block of codes for
// each of a lane's rows, which is multiplied by all vectors, and a sum for each row. Threadgroup memory holds the
// weighted products, [pairs + tokens, rows], which the threadgroup adds up at the end.
//
// Layout: hidden [T, k, I], shared_hidden [T, IS], w_down [E, D, I] and shared [D, IS] with strides; residual and y
// [T, D].
#include "experts/few_tokens.h"
#include "experts/parameters.h"
#include "experts/weighted_sum.h"

// The largest number of pairs, plus tokens of the shared expert, in the kernel for `Most` tokens.
template <int Most>
METAL_FUNC constexpr int most_products() {
  return (Most == 1 ? 32 : kFewPairs) + Most;
}

// A token's share of an expert's product.
struct Shares {
  device const uchar* topk_weights;
  device const uchar* shared_gate;
  bool is_shared;
  METAL_FUNC float for_pair(constant MoeDownParameters& parameters, int pair) const {
    if (is_shared) return shared_weight(shared_gate, parameters, pair);
    return weight_at(topk_weights, parameters, pair / parameters.pairs.k, pair % parameters.pairs.k);
  }
};

// Returns a lane's rows of one expert.
template <int Half, typename T, int Bits, int Width>
METAL_FUNC TwoMatrices<Half, T, Bits, Width> down_rows(Matrix matrix, int expert, int first, int D) {
  const int row = min(first, D - 1), next_row = min(first + Half, D - 1);
  return {
      rows_of<T, Bits, Width>(matrix, expert, row, D - row),
      rows_of<T, Bits, Width>(matrix, expert, next_row, D - next_row)};
}

// Multiplies the rows of one expert by the vectors of its pairs. Each weight is read once. The sums of a single vector
// stay in registers. The sums of several vectors go to threadgroup memory after each block.
template <typename Plan, int Half, typename T, int Bits, int Width>
METAL_FUNC void multiply_pairs(
    threadgroup float* products,
    constant MoeDownParameters& parameters,
    thread const Shares& shares,
    thread const TwoMatrices<Half, T, Bits, Width>& weights,
    thread const VectorRows<T>& vectors,
    PairSet pairs,
    uint lane) {
  constexpr int kRows = Plan::kRowsOfLane;
  static_assert(kRows <= kDownLanes, "a lane stores the sum of a row");
  typedef WeightBlock<Bits, Width> Block;
  constexpr int kStep = kDownLanes * Block::kColumns;
  const int columns = int(vectors.stride);
  const int count = pairs.count();
  float sums[kRows];
  UNROLL for (int row = 0; row < kRows; ++row) sums[row] = 0.0f;
  for (int first = 0; first < columns; first += kStep) {
    const int column = first + int(lane) % kDownLanes * Block::kColumns;
    WeightBlock<Bits, Width> blocks[kRows];
    if (column < columns) weights.load(blocks, column);
    PairSet open = pairs;
    for (int i = 0; i < count; ++i) {
      const int pair = open.take_first();
      if (column < columns) {
        const StoredVector<Block, T> vector{vectors.for_pair(pair) + column, columns - column};
        add_products<kRows, Block::kValues, T>(sums, blocks, vector);
      }
      if (count == 1 && first + kStep < columns) continue;
      const float product = reduce_to_lanes<kRows, kDownLanes>(sums, lane) * shares.for_pair(parameters, pair);
      threadgroup float* own = products + pair * Plan::kRows + int(lane) % kRows;
      if (int(lane) % kDownLanes < kRows) *own = first > 0 && count > 1 ? *own + product : product;
      UNROLL for (int row = 0; row < kRows; ++row) sums[row] = 0.0f;
    }
  }
}

template <typename T, int Most, int Width, int Bits = 0, int SharedBits = 0>
[[kernel, max_total_threads_per_threadgroup(kDownSimdgroups * 32)]] void moe_down(
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
  typedef DownPlan<Bits> Plan;
  constexpr int kHalf = Plan::kRowsOfLane / 2;
  constexpr int kThreads = kDownSimdgroups * 32;
  threadgroup float products[most_products<Most>() * Plan::kRows];
  constant PairParameters& pairs = parameters.pairs;
  const int count = pairs.count;
  const int first = int(group.x) * Plan::kRows;
  const bool has_shared = parameters.IS > 0;
  const bool is_shared = has_shared && simdgroup == kDownSimdgroups - 1;
  FewPairs few;
  if constexpr (Most > 1) few.load(topk_ids, pairs, lane);
  const Shares shares{topk_weights, shared_gate, is_shared};
  const int own_row = int(lane) / kDownLanes * Plan::kRowsOfLane;

  if (is_shared) {
    const auto rows = down_rows<kHalf, T, SharedBits, Width>(
        {shared_down_proj, shared_scales, shared_biases, &parameters.shared}, 0, first + own_row, parameters.D);
    const VectorRows<T> vectors{shared_hidden, parameters.IS, 1};
    multiply_pairs<Plan>(
        products + count * Plan::kRows + own_row, parameters, shares, rows, vectors, first_pairs(pairs.tokens), lane);
  } else {
    const VectorRows<T> vectors{hidden, parameters.I, 1};
    for (int pair = int(simdgroup); pair < count; pair += kDownSimdgroups - (has_shared ? 1 : 0)) {
      const int expert = expert_of_pair(topk_ids, pairs, pair);
      if (expert == kLeftOut) {
        if (first == 0 && lane == 0) report_pair(topk_ids, pairs, pair, errors);
        if (int(lane) < Plan::kRows) products[pair * Plan::kRows + int(lane)] = 0.0f;
        continue;
      }
      PairSet own = first_pairs(pair + 1);
      if constexpr (Most > 1) own = few.with_expert(expert, lane);
      const int all = own.count();
      own.drop_before(pair);
      if (Most > 1 && own.count() < all) continue;
      const auto rows = down_rows<kHalf, T, Bits, Width>(
          {w_down, w_scales, w_biases, &parameters.experts}, expert, first + own_row, parameters.D);
      multiply_pairs<Plan>(products + own_row, parameters, shares, rows, vectors, own, lane);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int item = int(thread_index); item < pairs.tokens * Plan::kRows; item += kThreads) {
    const int token = item / Plan::kRows;
    const int column = item % Plan::kRows;
    if (first + column >= parameters.D) continue;
    float sum = 0.0f;
    for (int j = 0; j < pairs.k; ++j) sum += products[(token * pairs.k + j) * Plan::kRows + column];
    if (has_shared) sum += products[(count + token) * Plan::kRows + column];
    store_sum(y, residual, parameters, int64_t(token) * parameters.D + first + column, sum);
  }
}
