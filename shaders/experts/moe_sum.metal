// y = the weighted sum of each token's products. A thread owns one column of a token.
// Layout: products [T k + T, D] f32, as moe_down_tiles leaves them; residual, y [T, D].
#include "experts/moe_sum.h"
#include "experts/weighted_sum.h"

struct StoredProducts {
  device const float* column;
  int64_t stride;
  METAL_FUNC float at(int64_t pair) const { return column[pair * stride]; }
};

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
  StoredProducts stored;
  stored.column = products + column;
  stored.stride = parameters.D;
  const float sum = weighted_sum(stored, topk_ids, topk_weights, shared_gate, parameters, int(group.y));
  store_sum(y, residual, parameters, int64_t(group.y) * parameters.D + column, sum);
}
