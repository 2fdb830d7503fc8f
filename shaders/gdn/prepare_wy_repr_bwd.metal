// Computes dv, dbeta, and the gradients of P and of L, which FLA's prepare_wy_repr_bwd computes from its A. A
// threadgroup owns one chunk of one value head, and takes 32 columns of V at a time. Each of its 4 simdgroups owns one
// 8x8 block of both matrices. The threads of a row share its dbeta.
// Registers: the block, and a part of a row's sum. Threadgroup memory: 32 columns of r, d_o and du.
// Layout: values, squares and betas as in chunk_bwd.h; dv [B, T, HV, V] and dbeta [B, T, HV] contiguous.
//     dv = beta du;  dbeta = sum du r;  dP = d_o (beta r)^T;  dL = -(beta du) (beta r)^T
// chunk_bwd_intra reads only the lower parts of dP and dL.
#include "gdn/chunk_bwd_walk.h"

template <typename T>
[[kernel]] void prepare_wy_repr_bwd(
    device const float* values [[buffer(0)]],
    device const float* betas [[buffer(1)]],
    device const int* cu_seqlens [[buffer(2)]],
    device float* squares [[buffer(3)]],
    device T* dv [[buffer(4)]],
    device float* dbeta [[buffer(5)]],
    constant ChunkBwdParameters& parameters [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int kStride = tile_stride<float>(kBwdSlice);
  constexpr int kLanes = kBwdThreads / kBwdChunk;  // of a row
  static_assert(kBlocks * kBlocks * 32 == kBwdThreads, "a simdgroup owns one block");
  static_assert(kLanes <= 32, "the threads of a row are in one simdgroup");
  alignas(16) threadgroup float residuals[kBwdChunk * kStride];
  alignas(16) threadgroup float outer[kBwdChunk * kStride];
  alignas(16) threadgroup float gradients[kBwdChunk * kStride];

  const Chunk chunk = own_chunk(cu_seqlens, parameters, group.x, group.z, lane);
  const int64_t head = group.y;
  const int64_t matrices = matrices_of(parameters, int64_t(group.z), int64_t(group.x), head);
  const LanePosition at = lane_position(lane);
  const int columns = parameters.value_columns;
  const int value_size = parameters.value_size;
  const int64_t value_heads = parameters.value_heads;
  const int64_t first = (int64_t(chunk.batch) * parameters.sequence.tokens + chunk.first) * value_heads + head;
  device const float* beta = betas + matrices * kBwdChunk;
  device const float* planes = values + value_plane(parameters, matrices, 0);
  const int block_row = int(simdgroup) / kBlocks;
  const int block_column = int(simdgroup) % kBlocks;
  const int row = int(thread_index) / kLanes;

  float2 dP = float2(0.0f), dL = float2(0.0f);
  float beta_sum = 0.0f;
  for (int column = 0; column < columns; column += kBwdSlice) {
    device const float* source = planes + column;
    const int64_t plane = int64_t(kBwdChunk) * columns;
    stage_rows<kBwdChunk, kBwdSlice, 4, kBwdThreads>(
        residuals, source + kBwdR * plane, columns, kBwdChunk, kBwdSlice, thread_index);
    stage_rows<kBwdChunk, kBwdSlice, 4, kBwdThreads>(
        outer, source + kBwdDo * plane, columns, kBwdChunk, kBwdSlice, thread_index);
    stage_rows<kBwdChunk, kBwdSlice, 4, kBwdThreads>(
        gradients, source + kBwdDu * plane, columns, kBwdChunk, kBwdSlice, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int depth = 0; depth < kBwdSlice; depth += 8) {
      const float2 right = load_transposed(residuals + block_column * 8 * kStride + depth, kStride, at);
      multiply_add(dP, load_even_fragment(outer + block_row * 8 * kStride + depth, kStride, at), right);
      multiply_add(dL, load_even_fragment(gradients + block_row * 8 * kStride + depth, kStride, at), right);
    }
    for (int each = int(thread_index) % kLanes; each < kBwdSlice; each += kLanes) {
      const float gradient = gradients[row * kStride + each];
      beta_sum += gradient * residuals[row * kStride + each];
      if (row < chunk.tokens && column + each < value_size) {
        dv[(first + row * value_heads) * value_size + column + each] = T(beta[row] * gradient);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  UNROLL for (ushort distance = 1; distance < kLanes; distance *= 2) beta_sum += simd_shuffle_xor(beta_sum, distance);
  if (int(thread_index) % kLanes == 0 && row < chunk.tokens) dbeta[first + row * value_heads] = beta_sum;

  const int i = block_row * 8 + at.row;
  const int j = block_column * 8 + at.column;
  const float2 column_beta = float2(beta[j], beta[j + 1]);
  dP *= column_beta;
  dL *= -beta[i] * column_beta;
  *(device float2*)(squares + square_plane(matrices, kBwdDP) + i * kBwdChunk + j) = dP;
  *(device float2*)(squares + square_plane(matrices, kBwdDL) + i * kBwdChunk + j) = dL;
}
