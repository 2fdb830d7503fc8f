// Computes hidden = silu(x W_gate) * (x W_up) for many tokens. A threadgroup owns a tile of pairs of one expert and
// kTileColumns rows of gate and of up (tiles.h). y counts the tiles of moe_align, then those of the shared expert.
// Layout: x [T, D], w_gate_up [E, 2 I, D], shared [IS, D], with strides; hidden [T, k, I], shared_hidden [T, IS].
#include "experts/gate_up.h"
#include "experts/tiles.h"

template <typename T, int Width, int Bits = 0, int SharedBits = 0>
[[kernel]] void moe_gate_up_tiles(
    device const T* x [[buffer(0)]],
    device const uchar* w_gate_up [[buffer(1)]],
    device const uchar* w_scales [[buffer(2)]],
    device const uchar* w_biases [[buffer(3)]],
    device const int* sorted_pairs [[buffer(4)]],
    device const PairTile* tiles [[buffer(5)]],
    device const uchar* shared_gate_proj [[buffer(6)]],
    device const uchar* shared_gate_scales [[buffer(7)]],
    device const uchar* shared_gate_biases [[buffer(8)]],
    device const uchar* shared_up_proj [[buffer(9)]],
    device const uchar* shared_up_scales [[buffer(10)]],
    device const uchar* shared_up_biases [[buffer(11)]],
    device T* hidden [[buffer(12)]],
    device T* shared_hidden [[buffer(13)]],
    constant MoeGateUpParameters& parameters [[buffer(14)]],
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
  const int width = is_shared ? parameters.IS : parameters.I;
  const int first = int(group.x) * kTileColumns;
  if (tile.rows == 0 || first >= width) return;
  load_pairs(pair_of_row, sorted_pairs, pairs, tile, thread_index);

  const LanePosition at = lane_position(lane);
  float2 sums[2 * kTileBlocks];
  UNROLL for (int i = 0; i < 2 * kTileBlocks; ++i) sums[i] = float2(0.0f);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (is_shared) {
    multiply_tile(
        sums, staged_vectors, staged_weights,
        rows_of<T, SharedBits, Width>(
            {shared_gate_proj, shared_gate_scales, shared_gate_biases, &parameters.shared_gate}, 0, first,
            width - first),
        rows_of<T, SharedBits, Width>(
            {shared_up_proj, shared_up_scales, shared_up_biases, &parameters.shared_up}, 0, first, width - first),
        {x, parameters.x_stride, 1}, pair_of_row, tile.rows, parameters.D, thread_index, simdgroup, at);
  } else if (tile.expert != kLeftOut) {
    multiply_tile(
        sums, staged_vectors, staged_weights,
        rows_of<T, Bits, Width>(
            {w_gate_up, w_scales, w_biases, &parameters.experts}, tile.expert, first, width - first),
        rows_of<T, Bits, Width>(
            {w_gate_up, w_scales, w_biases, &parameters.experts}, tile.expert, int64_t(width) + first, width - first),
        {x, parameters.x_stride, pairs.k}, pair_of_row, tile.rows, parameters.D, thread_index, simdgroup, at);
  }
  device T* target = is_shared ? shared_hidden : hidden;
  const int column = first + int(simdgroup) * 8 + at.column;
  UNROLL for (int block = 0; block < kTileBlocks; ++block) {
    const int row = block * 8 + at.row;
    if (row < tile.rows) {
      const float2 gate = sums[block];
      const float2 up = sums[kTileBlocks + block];
      device T* out = target + int64_t(pair_of_row[row]) * width + column;
      if (column < width) out[0] = T(silu_product(gate.x, up.x));
      if (column + 1 < width) out[1] = T(silu_product(gate.y, up.y));
    }
  }
}
