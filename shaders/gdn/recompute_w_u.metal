// A threadgroup owns one chunk of one value head. Each of its C/16 simdgroups owns 8 columns of u, then of w.
// Registers: 8 columns of the scaled operand, in f32 (FLA rounds it to k's type).
// Threadgroup memory: the inverse, and C/2 columns of k or v.
// Layout: k [B, T, H, K] and v [B, T, HV, V] with row strides, A_inv [B, T, HV, C] f32, g_cumsum f32, w and u
// contiguous.
//     u = A_inv (beta v);  w = A_inv (beta exp(g_cumsum) k)
#include "core/sequences.h"
#include "gdn/parameters.h"
#include "gdn/triangle.h"

// Computes result = inverse * (scale source), the simdgroup's 8 columns of each slice.
template <int Columns, int C, int Width, typename T>
METAL_FUNC void multiply_inverse(
    threadgroup const float* inverse,
    threadgroup const float* scale,
    threadgroup T* tile,
    device const T* source,
    int64_t source_stride,
    device T* result,
    int64_t result_stride,
    int tokens,
    uint thread_index,
    uint simdgroup,
    LanePosition at) {
  constexpr int kTile = C / 2;
  constexpr int kStride = tile_stride<T>(kTile);
  for (int first = 0; first < Columns; first += kTile) {
    stage_rows<C, kTile, Width, chunk_threads(C)>(
        tile, source + first, source_stride, tokens, Columns - first, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float2 operand[C / 8];
    load_operand<C, 1, kTile>(operand, tile, scale, simdgroup, at);
    simdgroup_barrier(mem_flags::mem_threadgroup);  // the product replaces the simdgroup's own columns
    UNROLL for (int row = 0; row < C / 8; ++row) {
      float2 sum = float2(0.0f);
      UNROLL for (int depth = 0; depth <= row; ++depth) {
        multiply_add(sum, load_triangle(inverse, row, depth, at), operand[depth]);
      }
      store_even_fragment(tile + int(simdgroup) * 8 + row * 8 * kStride, kStride, at, sum);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    write_rows<C, kTile, Width, chunk_threads(C)>(
        result + first, tile, result_stride, tokens, Columns - first, thread_index);
    // Needs no barrier: stage_rows gives each thread the vectors that it has just written out.
  }
}

template <typename T, int K, int V, int C, int Width>
[[kernel]] void recompute_w_u(
    device const T* k [[buffer(0)]],
    device const T* v [[buffer(1)]],
    device const float* beta [[buffer(2)]],
    device const float* A_inv [[buffer(3)]],
    device const float* g_cumsum [[buffer(4)]],
    device const int* cu_seqlens [[buffer(5)]],
    device T* w [[buffer(6)]],
    device T* u [[buffer(7)]],
    device ErrorLog* errors [[buffer(8)]],
    constant RecomputeWUParameters& parameters [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(C == 16 || C == 32 || C == 64, "a chunk has 16, 32 or 64 tokens");
  static_assert(K >= 1 && K <= 256 && V >= 1 && V <= 512, "K is at most 256 and V at most 512");
  constexpr int kThreads = chunk_threads(C);
  alignas(16) threadgroup float inverse[triangle_floats<C>()];
  threadgroup float value_scale[C];
  threadgroup float key_scale[C];
  alignas(16) threadgroup T tile[C * tile_stride<T>(C / 2)];

  const Chunk chunk = locate_own_chunk(cu_seqlens, parameters.sequence, group, C, errors, simdgroup, lane);
  const int64_t token = int64_t(chunk.batch) * parameters.sequence.tokens + chunk.first;
  const int64_t head = int64_t(group.y);
  const int64_t key_head = key_head_of(int(group.y), parameters.heads);
  const int64_t row = token * parameters.value_heads + head;

  for (int item = int(thread_index); item < C * C; item += kThreads) {
    const int i = item / C;
    const int j = item % C;
    const int64_t source = (row + int64_t(i) * parameters.value_heads) * C + j;
    if (i / 8 >= j / 8) inverse[triangle_element(i, j)] = i >= j && i < chunk.tokens ? A_inv[source] : 0.0f;
  }
  if (int(thread_index) < C) {
    const int i = int(thread_index);
    const int64_t source = row + int64_t(i) * parameters.value_heads;
    value_scale[i] = i < chunk.tokens ? beta[source] : 0.0f;
    key_scale[i] = i < chunk.tokens ? beta[source] * exp(g_cumsum[source]) : 0.0f;
  }
  // Needs no barrier: the first barrier of multiply_inverse precedes the reads of these tiles.

  const LanePosition at = lane_position(lane);
  multiply_inverse<V, C, Width>(
      inverse, value_scale, tile, v + offset_of(parameters.v, chunk.batch, chunk.first, head), parameters.v.token,
      u + row * V, int64_t(parameters.value_heads) * V, chunk.tokens, thread_index, simdgroup, at);
  multiply_inverse<K, C, Width>(
      inverse, key_scale, tile, k + offset_of(parameters.k, chunk.batch, chunk.first, key_head), parameters.k.token,
      w + row * K, int64_t(parameters.value_heads) * K, chunk.tokens, thread_index, simdgroup, at);
}
