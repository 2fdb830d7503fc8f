// Computes the part of du that comes from the outputs of the same chunk, as FLA's chunk_bwd_dv_local. A threadgroup
// owns one chunk of one value head, and takes 32 columns of V at a time, 8 in each of its 4 simdgroups. Registers: du
// of those columns. Threadgroup memory: P, and 32 columns of d_o. Layout: squares and values as in chunk_bwd.h.
//     du = P^T d_o
#include "gdn/chunk_bwd_walk.h"

template <int Threads>
[[kernel]] void chunk_bwd_dv_local(
    device const float* squares [[buffer(0)]],
    device float* values [[buffer(1)]],
    constant ChunkBwdParameters& parameters [[buffer(2)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(Threads == kBwdThreads, "each of 4 simdgroups owns 8 columns of a slice");
  constexpr int kStride = tile_stride<float>(kBwdSlice);
  alignas(16) threadgroup float P[kSquareFloats];
  alignas(16) threadgroup float tile[kBwdChunk * kStride];
  const int64_t matrices = matrices_of(parameters, int64_t(group.z), int64_t(group.x), int64_t(group.y));
  const LanePosition at = lane_position(lane);
  const int columns = parameters.value_columns;
  device const float* d_o = values + value_plane(parameters, matrices, kBwdDo);
  device float* du = values + value_plane(parameters, matrices, kBwdDu);
  stage_square(P, squares + square_plane(matrices, kBwdP), thread_index);
  for (int column = 0; column < columns; column += kBwdSlice) {
    stage_rows<kBwdChunk, kBwdSlice, 4, Threads>(tile, d_o + column, columns, kBwdChunk, kBwdSlice, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int block = 0; block < kBlocks; ++block) {
      float2 sum = float2(0.0f);
      UNROLL for (int depth = block; depth < kBlocks; ++depth) {
        const float2 right = load_even_fragment(tile + depth * 8 * kStride + int(simdgroup) * 8, kStride, at);
        multiply_add(sum, load_transposed(P + square_block(depth, block), kSquareStride, at), right);
      }
      store_even_fragment(du + int64_t(block) * 8 * columns + column + int(simdgroup) * 8, columns, 8, at, sum);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
