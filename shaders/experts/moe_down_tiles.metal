// Computes products = hidden W_down for each pair, in f32, for many tokens. moe_sum adds them up. A threadgroup owns a
// tile of pairs of one expert and 2 * kTileColumns rows of its matrix (tiles.h). y counts the tiles of moe_align, then
// those of the shared expert. The products of the shared expert follow those of the pairs.
// Layout: hidden [T, k, I], shared_hidden [T, IS], w_down [E, D, I] and shared [D, IS] with strides; products
// [T k + T, D].
#include "experts/tiles.h"

template <typename T, int Width, int Bits = 0, int SharedBits = 0>
[[kernel]] void moe_down_tiles(
    device const T* hidden [[buffer(0)]],
    device const uchar* w_down [[buffer(1)]],
    device const uchar* w_scales [[buffer(2)]],
    device const uchar* w_biases [[buffer(3)]],
    device const int* sorted_pairs [[buffer(4)]],
    device const PairTile* tiles [[buffer(5)]],
    device const T* shared_hidden [[buffer(6)]],
    device const uchar* shared_down_proj [[buffer(7)]],
    device const uchar* shared_scales [[buffer(8)]],
    device const uchar* shared_biases [[buffer(9)]],
    device float* products [[buffer(10)]],
    constant MoeDownParameters& parameters [[buffer(11)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(staged_bytes<T, SharedBits>() <= staged_bytes<T, Bits>(), "both are staged in the same memory");
  alignas(16) threadgroup T staged_vectors[size_of_tile<T>()];
  alignas(16) threadgroup uchar staged_weights[2 * staged_bytes<T, Bits>()];
  threadgroup int pair_of_row[kTilePairs];
  constant PairParameters& pairs = parameters.pairs;
  const OwnTile tile = locate_tile(tiles, pairs, int(group.y));
  const bool is_shared = tile.expert == pairs.experts;
  constexpr int kRows = 2 * kTileColumns;
  const int first = int(group.x) * kRows;
  if (tile.rows == 0 || tile.expert == kLeftOut || first >= parameters.D) return;
  load_pairs(pair_of_row, sorted_pairs, pairs, tile, thread_index);

  const LanePosition at = lane_position(lane);
  float2 sums[2 * kTileBlocks];
  if (is_shared) {
    multiply_tile(
        sums, staged_vectors, staged_weights,
        rows_of<T, SharedBits, Width>(
            {shared_down_proj, shared_scales, shared_biases, &parameters.shared}, 0, first, parameters.D - first),
        rows_of<T, SharedBits, Width>(
            {shared_down_proj, shared_scales, shared_biases, &parameters.shared}, 0, first + kTileColumns,
            parameters.D - first - kTileColumns),
        {shared_hidden, parameters.IS, 1}, pair_of_row, tile.rows, parameters.IS, thread_index, simdgroup, at);
  } else {
    multiply_tile(
        sums, staged_vectors, staged_weights,
        rows_of<T, Bits, Width>(
            {w_down, w_scales, w_biases, &parameters.experts}, tile.expert, first, parameters.D - first),
        rows_of<T, Bits, Width>(
            {w_down, w_scales, w_biases, &parameters.experts}, tile.expert, first + kTileColumns,
            parameters.D - first - kTileColumns),
        {hidden, parameters.I, 1}, pair_of_row, tile.rows, parameters.I, thread_index, simdgroup, at);
  }
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
