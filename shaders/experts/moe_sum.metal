// Computes y, the weighted sum of each token's products. A thread owns one column of a token.
// Layout: products [T k + T, D] f32, as moe_down_tiles writes them; residual and y [T, D].
#include "experts/parameters.h"
#include "experts/weighted_sum.h"

template <typename T>
[[kernel]] void moe_sum(
    device const float* products [[buffer(0)]],
    device const uchar* topk_weights [[buffer(1)]],
    device const int* topk_ids [[buffer(2)]],
    device const uchar* shared_gate [[buffer(3)]],
    device const T* residual [[buffer(4)]],
    device T* y [[buffer(5)]],
    constant MoeDownParameters& parameters [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const int column = int(group.x) * kSumThreads + int(thread_index);
  if (column >= parameters.D) return;
  constant PairParameters& pairs = parameters.pairs;
  const int token = int(group.y);
  device const float* own = products + column;
  float sum = 0.0f;
  for (int slot = 0; slot < pairs.k; ++slot) {
    if (expert_at(topk_ids, pairs, token, slot) == kLeftOut) continue;
    const int64_t pair = int64_t(token) * pairs.k + slot;
    sum += weight_at(topk_weights, parameters, token, slot) * own[pair * parameters.D];
  }
  if (parameters.IS > 0) {
    sum += shared_weight(shared_gate, parameters, token) * own[(int64_t(pairs.count) + token) * parameters.D];
  }
  store_sum(y, residual, parameters, int64_t(token) * parameters.D + column, sum);
}
