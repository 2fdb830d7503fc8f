// Computes hidden = silu(x W_gate) * (x W_up) for up to 8 tokens. A threadgroup owns GateUpPlan's rows of gate and of
// up of one expert, and all pairs of that expert. y counts pairs, then the shared expert. The threadgroup of the first
// pair of an expert does the work. A simdgroup owns 2 rows of gate and 2 of up. Registers: a sum for each row and
// vector.
// Layout: x [T, D], w_gate_up [E, 2 I, D], shared [IS, D], with strides; hidden [T, k, I], shared_hidden [T, IS].
#include "experts/few_tokens.h"
#include "experts/gate_up.h"
#include "experts/parameters.h"

// The products of a simdgroup's rows with the vectors of a group of pairs.
template <int Threads, int Most, typename T>
struct Products {
  device T* target;
  threadgroup T* staged;
  VectorRows<T> vectors;
  PairGroup<Most> own;
  int width, row, columns;
  uint thread_index, lane;

  // Multiplies and stores. Lane row * Count + v of a simdgroup stores its row for vector v.
  template <int Count, typename Matrices>
  METAL_FUNC void store_for(thread const Matrices& weights) const {
    constexpr int kValues = kRowsOfHalf * Count;
    float sums[2 * kValues];
    multiply_vectors<Count, Threads>(sums, staged, weights, vectors, own, columns, thread_index, lane);
    const float gate = reduce_to_lanes<kValues>(sums, lane);
    const float up = reduce_to_lanes<kValues>(sums + kValues, lane);
    const int v = int(lane) % Count;
    PairSet pairs = own.pairs;
    int pair = pairs.take_first();
    UNROLL for (int i = 1; i < Count; ++i) {
      if (i < own.count) {
        const int next = pairs.take_first();
        pair = v == i ? next : pair;
      }
    }
    const int own_row = row + int(lane) / Count;
    const bool is_there = int(lane) < kValues && v < own.count && own_row < width;
    if (is_there) target[int64_t(pair) * width + own_row] = T(silu_product(gate, up));
  }

  template <typename Matrices>
  METAL_FUNC void store(thread const Matrices& weights) const {
    if (own.count == 1) {
      store_for<1>(weights);
    } else if constexpr (Most > 1) {
      store_for<Most>(weights);
    }
  }
};

template <typename T, int Most, int Width, int Bits = 0, int SharedBits = 0>
[[kernel, max_total_threads_per_threadgroup(GateUpPlan<Bits>::kSimdgroups * 32)]] void moe_gate_up(
    device const T* x [[buffer(0)]],
    device const uchar* w_gate_up [[buffer(1)]],
    device const uchar* w_scales [[buffer(2)]],
    device const uchar* w_biases [[buffer(3)]],
    device const int* topk_ids [[buffer(4)]],
    device const uchar* shared_gate_proj [[buffer(5)]],
    device const uchar* shared_gate_scales [[buffer(6)]],
    device const uchar* shared_gate_biases [[buffer(7)]],
    device const uchar* shared_up_proj [[buffer(8)]],
    device const uchar* shared_up_scales [[buffer(9)]],
    device const uchar* shared_up_biases [[buffer(10)]],
    device T* hidden [[buffer(11)]],
    device T* shared_hidden [[buffer(12)]],
    device ErrorLog* errors [[buffer(13)]],
    constant MoeGateUpParameters& parameters [[buffer(14)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef GateUpPlan<Bits> Plan;
  constexpr int kThreads = Plan::kSimdgroups * 32;
  alignas(16) threadgroup T staged[Most * staged_columns<T, Most>()];
  constant PairParameters& pairs = parameters.pairs;
  const int pair = int(group.y);
  const int first = int(group.x) * Plan::kRows;
  const bool is_shared = pair == pairs.count;
  const int width = is_shared ? parameters.IS : parameters.I;
  if (first >= width) return;

  PairGroup<Most> own;
  int expert = 0;
  if (is_shared) {
    own.take_tokens(pairs.tokens);
  } else {
    expert = expert_of_pair(topk_ids, pairs, pair);
    if (expert == kLeftOut) {
      if (first == 0 && thread_index == 0) report_pair(topk_ids, pairs, pair, errors);
      const int row = first + int(thread_index);
      if (int(thread_index) < Plan::kRows && row < width) hidden[int64_t(pair) * width + row] = T(0);
      return;
    }
    FewPairs few;
    few.load(topk_ids, pairs, lane);
    own.take(few, expert, pair, lane);
    if (own.count == 0) return;
  }

  const int row = first + int(simdgroup) * kRowsOfHalf;
  const int own_row = min(row, width - 1);
  const Products<kThreads, Most, T> products{
      is_shared ? shared_hidden : hidden,
      staged,
      {x, parameters.x_stride, is_shared ? 1 : pairs.k},
      own,
      width,
      row,
      parameters.D,
      thread_index,
      lane};
  if (is_shared) {
    const TwoMatrices<kRowsOfHalf, T, SharedBits, Width> weights{
        rows_of<T, SharedBits, Width>(
            {shared_gate_proj, shared_gate_scales, shared_gate_biases, &parameters.shared_gate}, 0, own_row,
            width - own_row),
        rows_of<T, SharedBits, Width>(
            {shared_up_proj, shared_up_scales, shared_up_biases, &parameters.shared_up}, 0, own_row, width - own_row)};
    products.store(weights);
  } else {
    const TwoMatrices<kRowsOfHalf, T, Bits, Width> weights{
        rows_of<T, Bits, Width>({w_gate_up, w_scales, w_biases, &parameters.experts}, expert, own_row, width - own_row),
        rows_of<T, Bits, Width>(
            {w_gate_up, w_scales, w_biases, &parameters.experts}, expert, int64_t(width) + own_row, width - own_row)};
    products.store(weights);
  }
}
