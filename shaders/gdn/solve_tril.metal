// One threadgroup owns one chunk of one value head and inverts I + A in place, in f32, in threadgroup memory.
// In registers: a column of a 16-row block while it is solved, then 8 columns of a product while blocks are merged.
// Layout: A and A_inv [B, T, HV, C] f32. Forward substitution within 16 rows, since a Neumann series over more than 8
// is off by 2.5e-2 with repeated keys and beta 1.9; merging blocks costs 1e-6 there.
#include "common/fragment.h"
#include "common/sequences.h"

// [L11 0; L21 L22]^-1 = [X11 0; -X22 L21 X11  X22]: turns the inverses of N-row blocks into those of 2N-row blocks.
// Each of the C/16 simdgroups owns 8 columns of one pair of blocks.
template <int N, int Stride>
METAL_FUNC void merge_blocks(threadgroup float* inverse, uint simdgroup, LanePosition at) {
  constexpr int kBlocks = N / 8;
  const int first = int(simdgroup) / kBlocks * 2 * N;
  const int column = int(simdgroup) % kBlocks * 8;
  threadgroup float* upper = inverse + first * Stride + first;  // X11
  threadgroup float* lower = upper + N * Stride;                // L21, then the result
  threadgroup float* right = lower + N;                         // X22

  float2 product[kBlocks];
  UNROLL for (int row = 0; row < kBlocks; ++row) {
    product[row] = float2(0.0f);
    UNROLL for (int depth = 0; depth < kBlocks; ++depth) {
      multiply_add(
          product[row], load_fragment(lower + row * 8 * Stride + depth * 8, Stride, at),
          load_fragment(upper + depth * 8 * Stride + column, Stride, at));
    }
  }
  float2 result[kBlocks];
  UNROLL for (int row = 0; row < kBlocks; ++row) {
    result[row] = float2(0.0f);
    UNROLL for (int depth = 0; depth <= row; ++depth) {
      multiply_add(result[row], load_fragment(right + row * 8 * Stride + depth * 8, Stride, at), product[depth]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (int row = 0; row < kBlocks; ++row) {
    store_fragment(lower + row * 8 * Stride + column, Stride, at, -result[row]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

template <int C>
[[kernel]] void solve_tril(
    device const float* A [[buffer(0)]],
    device const int64_t* bounds [[buffer(1)]],
    device float* A_inv [[buffer(2)]],
    constant SolveParameters& parameters [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(C == 16 || C == 32 || C == 64, "a chunk has 16, 32 or 64 tokens");
  constexpr int kThreads = 2 * C;
  constexpr int kStride = C + 4;  // 4 banks further each row
  threadgroup float inverse[C * kStride];

  const Chunk chunk = locate_chunk(bounds, parameters.sequence, int(group.x), int(group.z), C, lane);
  const int64_t row_stride = int64_t(parameters.value_heads) * C;
  const int64_t first =
      (int64_t(chunk.batch) * parameters.sequence.tokens + chunk.first) * row_stride + int64_t(group.y) * C;

  for (int item = int(thread_index); item < C * C; item += kThreads) {
    const int i = item / C;
    const int j = item % C;
    inverse[i * kStride + j] = i > j && i < chunk.tokens ? A[first + i * row_stride + j] : 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Thread t < C solves column t of the diagonal block that holds it: x_i = [i == j] - sum over m < i of A_im x_m.
  const int block = int(thread_index) / 16 * 16;
  const int column = int(thread_index) % 16;
  float x[16];
  if (int(thread_index) < C) {
    threadgroup const float* rows = inverse + block * kStride + block;
    UNROLL for (int i = 0; i < 16; ++i) {
      x[i] = i == column ? 1.0f : 0.0f;
      UNROLL for (int m = 0; m < i; ++m) x[i] -= rows[i * kStride + m] * x[m];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (int(thread_index) < C) {
    UNROLL for (int i = 0; i < 16; ++i) inverse[(block + i) * kStride + block + column] = x[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const LanePosition at = lane_position(lane);
  if (C >= 32) merge_blocks<16, kStride>(inverse, simdgroup, at);
  if (C >= 64) merge_blocks<32, kStride>(inverse, simdgroup, at);

  for (int item = int(thread_index); item < C * C; item += kThreads) {
    const int i = item / C;
    const int j = item % C;
    if (i < chunk.tokens) A_inv[first + i * row_stride + j] = inverse[i * kStride + j];
  }
}
