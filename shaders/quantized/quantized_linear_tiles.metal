// Computes y = x W^T + bias for many rows of x. A threadgroup owns a tile of kTilePairs rows of x and 2 * kTileColumns
// rows of W (tiles.h). moe_logits launches this kernel with weights that are not packed, and with O = float.
// Layout: x [M, K] and W [N, K] with strides, bias [N]; y [M, N] in O.
#include "experts/tiles.h"
#include "quantized/bias.h"

template <typename T, int Width, int Bits, typename O = T>
[[kernel]] void quantized_linear_tiles(
    device const T* x [[buffer(0)]],
    device const uchar* weight [[buffer(1)]],
    device const uchar* scales [[buffer(2)]],
    device const uchar* biases [[buffer(3)]],
    device const uchar* bias [[buffer(4)]],
    device O* y [[buffer(5)]],
    constant QuantizedLinearParameters& parameters [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  alignas(16) threadgroup T staged_vectors[size_of_tile<T>()];
  alignas(16) threadgroup uchar staged_weights[2 * staged_bytes<T, Bits>()];
  threadgroup int vector_of_row[kTilePairs];
  constexpr int kRows = 2 * kTileColumns;
  const int first = int(group.x) * kRows;
  const int first_vector = int(group.y) * kTilePairs;
  const int rows = min(kTilePairs, parameters.M - first_vector);
  if (first >= parameters.N || first_vector >= parameters.M) return;
  if (int(thread_index) < kTilePairs) vector_of_row[thread_index] = first_vector + int(thread_index);

  const int lower_first = first + kTileColumns;
  const LanePosition at = lane_position(lane);
  float2 sums[2 * kTileBlocks];
  multiply_tile(
      sums, staged_vectors, staged_weights,
      rows_of<T, Bits, Width>({weight, scales, biases, &parameters.weight}, 0, first, parameters.N - first),
      rows_of<T, Bits, Width>({weight, scales, biases, &parameters.weight}, 0, lower_first, parameters.N - lower_first),
      {x, parameters.x_stride, 1}, vector_of_row, rows, parameters.K, thread_index, simdgroup, at);
  UNROLL for (int half_of_rows = 0; half_of_rows < 2; ++half_of_rows) {
    const int column = first + half_of_rows * kTileColumns + int(simdgroup) * 8 + at.column;
    const bool has_one = column < parameters.N;
    const bool has_two = column + 1 < parameters.N;
    const float added = has_one ? bias_at(bias, parameters, column) : 0.0f;
    const float next_added = has_two ? bias_at(bias, parameters, column + 1) : 0.0f;
    UNROLL for (int block = 0; block < kTileBlocks; ++block) {
      const int row = block * 8 + at.row;
      const float2 sum = sums[half_of_rows * kTileBlocks + block];
      device O* out = y + int64_t(first_vector + row) * parameters.N + column;
      if (row < rows && has_one) out[0] = O(sum.x + added);
      if (row < rows && has_two) out[1] = O(sum.y + next_added);
    }
  }
}
