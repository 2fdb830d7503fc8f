// products = hidden W_down of each pair, in f32, for many tokens; moe_sum adds them up. A threadgroup owns a tile of
// pairs of one expert and 2 * kTileColumns rows of its matrix, as tiles.h says; y counts the tiles of moe_align, then
// those of the shared expert, whose products follow those of the pairs.
// Layout: hidden [T, k, I], shared_hidden [T, IS], w_down [E, D, I] and shared [D, IS] with strides; products
// [T k + T, D].
#include "experts/tiles.h"

template <typename T, int Width>
[[kernel]] void moe_down_tiles(
    device const T* hidden [[buffer(0)]],
    device const T* w_down [[buffer(1)]],
    device const int* sorted_pairs [[buffer(2)]],
    device const PairTile* tiles [[buffer(3)]],
    device const T* shared_hidden [[buffer(4)]],
    device const T* shared_down_proj [[buffer(5)]],
    device float* products [[buffer(6)]],
    constant MoeDownParameters& parameters [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  alignas(16) threadgroup T staged_vectors[size_of_tile<T>()];
  alignas(16) threadgroup T staged_weights[2 * size_of_tile<T>()];
  threadgroup int pair_of_row[kTilePairs];
  constant PairParameters& pairs = parameters.pairs;
  const OwnTile tile = locate_tile(tiles, pairs, int(group.y));
  const bool is_shared = tile.expert == pairs.experts;
  const int columns = is_shared ? parameters.IS : parameters.I;
  constexpr int kRows = 2 * kTileColumns;
  const int first = int(group.x) * kRows;
  if (tile.rows == 0 || tile.expert == kLeftOut || first >= parameters.D) return;
  load_pairs(pair_of_row, sorted_pairs, pairs, tile, thread_index);

  device const T* weights = is_shared ? shared_down_proj : w_down + tile.expert * parameters.expert_stride;
  const int64_t stride = is_shared ? parameters.shared_stride : parameters.row_stride;
  const DenseWeights<T, Width> upper = dense_weights<Width>(weights, stride, parameters.D, first);
  const DenseWeights<T, Width> lower = dense_weights<Width>(weights, stride, parameters.D, first + kTileColumns);
  const LanePosition at = lane_position(lane);
  float2 sums[2 * kTileBlocks];
  multiply_tile<Width>(
      sums, staged_vectors, staged_weights, upper, lower, is_shared ? shared_hidden : hidden, columns, 1, pair_of_row,
      tile.rows, columns, thread_index, simdgroup, at);
  const int64_t first_product = is_shared ? pairs.count : 0;
  UNROLL for (int i = 0; i < 2 * kTileBlocks; ++i) {
    const int row = i % kTileBlocks * 8 + at.row;
    const int column = first + i / kTileBlocks * kTileColumns + int(simdgroup) * 8 + at.column;
    if (row < tile.rows) {
      device float* out = products + (first_product + pair_of_row[row]) * parameters.D + column;
      if (column < parameters.D) out[0] = sums[i].x;
      if (column + 1 < parameters.D) out[1] = sums[i].y;
    }
  }
}
