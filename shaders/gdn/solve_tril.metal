// A threadgroup owns one chunk of one value head, and inverts I + A in threadgroup memory, in f32. Registers: a column
// of an 8-row block, then 8 columns of a product of blocks.
// Layout: A and A_inv [B, T, HV, C] f32, zero above the diagonal.
#include "core/sequences.h"
#include "gdn/parameters.h"
#include "gdn/triangle.h"

template <int C>
[[kernel]] void solve_tril(
    device const float* A [[buffer(0)]],
    device const int* cu_seqlens [[buffer(1)]],
    device float* A_inv [[buffer(2)]],
    device ErrorLog* errors [[buffer(3)]],
    constant SolveTrilParameters& parameters [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(C == 16 || C == 32 || C == 64, "a chunk has 16, 32 or 64 tokens");
  constexpr int kThreads = chunk_threads(C);
  alignas(16) threadgroup float triangle[triangle_floats<C>()];

  const Chunk chunk = locate_own_chunk(cu_seqlens, parameters.sequence, group, C, errors, simdgroup, lane);
  const int64_t row_stride = int64_t(parameters.value_heads) * C;
  const int64_t first =
      (int64_t(chunk.batch) * parameters.sequence.tokens + chunk.first) * row_stride + int64_t(group.y) * C;

  for (int item = int(thread_index); item < C * C; item += kThreads) {
    const int i = item / C;
    const int j = item % C;
    if (i / 8 >= j / 8) {
      triangle[triangle_element(i, j)] = i > j && i < chunk.tokens ? A[first + i * row_stride + j] : 0.0f;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  invert_triangle<C>(triangle, thread_index, simdgroup, lane_position(lane));

  for (int item = int(thread_index); item < C * C; item += kThreads) {
    const int i = item / C;
    const int j = item % C;
    if (i < chunk.tokens) A_inv[first + i * row_stride + j] = i >= j ? triangle[triangle_element(i, j)] : 0.0f;
  }
}
