// A threadgroup owns one chunk of one key head. Simdgroup s owns block rows s and C/8-1-s, so that each simdgroup owns
// the same number of blocks.
// Registers: k k^T of those blocks, computed once for all value heads of the key head.
// Layout: k [B, T, H, K] with row strides, g_cumsum and beta [B, T, HV] f32, A [B, T, HV, C] f32.
//     A_ij = beta_i (k_i . k_j) exp(c_i - c_j) for i > j, else 0;  c = g_cumsum
#include "core/sequences.h"
#include "gdn/parameters.h"
#include "gdn/triangle.h"

// Stores columns j and j + 1 of row i. exp(c_i - c_j) is computed only below the diagonal, because it overflows above.
template <int C>
METAL_FUNC void write_block(
    device float* A,
    device const float* g_cumsum,
    device const float* beta,
    int value_heads,
    int i,
    int j,
    int tokens,
    float2 product) {
  if (i < tokens) {
    float2 value = float2(0.0f);
    const int64_t row = int64_t(i) * value_heads;
    if (i > j) value.x = beta[row] * product.x * exp(g_cumsum[row] - g_cumsum[int64_t(j) * value_heads]);
    if (i > j + 1) value.y = beta[row] * product.y * exp(g_cumsum[row] - g_cumsum[int64_t(j + 1) * value_heads]);
    *(device float2*)(A + row * C + j) = value;
  }
}

template <typename T, int K, int C, int Width>
[[kernel]] void chunk_scaled_dot_kkt(
    device const T* k [[buffer(0)]],
    device const float* g_cumsum [[buffer(1)]],
    device const float* beta [[buffer(2)]],
    device const int* cu_seqlens [[buffer(3)]],
    device float* A [[buffer(4)]],
    device ErrorLog* errors [[buffer(5)]],
    constant ChunkScaledDotKktParameters& parameters [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(C == 16 || C == 32 || C == 64, "a chunk has 16, 32 or 64 tokens");
  static_assert(K >= 1 && K <= 256, "K is at most 256");
  constexpr int kBlocks = C / 8;
  constexpr int kSlice = 32;
  alignas(16) threadgroup T tile[C * tile_stride<T>(kSlice)];

  const Chunk chunk = locate_own_chunk(cu_seqlens, parameters.sequence, group, C, errors, simdgroup, lane);
  const LanePosition at = lane_position(lane);
  const int low_row = int(simdgroup);
  const int high_row = kBlocks - 1 - low_row;

  float2 products[kBlocks + 1];
  UNROLL for (int n = 0; n <= kBlocks; ++n) products[n] = float2(0.0f);
  device const T* keys = k + offset_of(parameters.k, chunk.batch, chunk.first, group.y);
  for (int slice = 0; slice < K; slice += kSlice) {
    stage_rows<C, kSlice, Width, chunk_threads(C)>(
        tile, keys + slice, parameters.k.token, chunk.tokens, K - slice, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    add_lower_products<C, kSlice>(products, tile, tile, simdgroup, at);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  const int value_heads = parameters.value_heads;
  for (int member = 0; member < parameters.heads.members; ++member) {
    const int64_t head = int64_t(group.y) * parameters.heads.divisor + int64_t(member) * parameters.heads.member_stride;
    const int64_t first = (int64_t(chunk.batch) * parameters.sequence.tokens + chunk.first) * value_heads + head;
    UNROLL for (int n = 0; n <= kBlocks; ++n) {
      const BlockPosition block = own_block<C>(simdgroup, n);
      write_block<C>(
          A + first * C, g_cumsum + first, beta + first, value_heads, block.row * 8 + at.row,
          block.column * 8 + at.column, chunk.tokens, products[n]);
    }
    // Writes zeros above the diagonal: high_row blocks in the low row, then low_row blocks in the high row.
    UNROLL for (int n = 0; n < kBlocks - 1; ++n) {
      const int row = n < high_row ? low_row : high_row;
      const int column = n < high_row ? low_row + 1 + n : n + 1;
      write_block<C>(
          A + first * C, g_cumsum + first, beta + first, value_heads, row * 8 + at.row, column * 8 + at.column,
          chunk.tokens, float2(0.0f));
    }
  }
}
