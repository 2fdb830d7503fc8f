// One threadgroup owns one chunk of one value head; each of its C/16 simdgroups owns 8 columns of u, then of w.
// In registers: the 8 columns of the scaled operand. In threadgroup memory: the inverse and C/2 staged columns.
// Layout: k [B, T, H, K] and v [B, T, HV, V] with row strides, A (the inverse) [B, T, HV, C] f32, w and u contiguous.
// S is the type of w and u: T, or float where T is half, whose range a state can leave.
// u = A (beta v), w = A (beta exp(c) k); the scaled operand stays f32 (FLA rounds it to k's type).
#include "common/fragment.h"
#include "common/sequences.h"
#include "common/tile.h"

template <int Columns, int C, int Width, typename T, typename S>
METAL_FUNC void multiply_inverse(
    threadgroup const float* inverse,
    threadgroup const float* scale,
    threadgroup T* tile,
    device const T* source,
    int64_t source_stride,
    device S* result,
    int64_t result_stride,
    int tokens,
    uint thread_index,
    uint simdgroup,
    LanePosition at) {
  constexpr int kBlocks = C / 8;
  constexpr int kTile = C / 2;
  constexpr int kTileStride = tile_stride<T>(kTile);
  constexpr int kInverseStride = C + 4;
  const int own = int(simdgroup) * 8;
  for (int column = 0; column < Columns; column += kTile) {
    stage_rows<C, kTile, Width, 2 * C>(tile, source + column, source_stride, tokens, Columns - column, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float2 operand[kBlocks];
    UNROLL for (int depth = 0; depth < kBlocks; ++depth) {
      operand[depth] = load_fragment(tile + depth * 8 * kTileStride + own, kTileStride, at) * scale[depth * 8 + at.row];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int row = 0; row < kBlocks; ++row) {
      float2 sum = float2(0.0f);
      UNROLL for (int depth = 0; depth <= row; ++depth) {
        multiply_add(
            sum, load_fragment(inverse + row * 8 * kInverseStride + depth * 8, kInverseStride, at), operand[depth]);
      }
      store_fragment(
          result + row * 8 * result_stride + column + own, result_stride, 1, tokens - row * 8, Columns - column - own,
          at, sum);
    }
  }
}

template <typename T, typename S, int K, int V, int C, int Width>
[[kernel]] void recompute_w_u(
    device const T* k [[buffer(0)]],
    device const T* v [[buffer(1)]],
    device const float* beta [[buffer(2)]],
    device const float* A [[buffer(3)]],
    device const float* g [[buffer(4)]],
    device const int64_t* bounds [[buffer(5)]],
    device S* w [[buffer(6)]],
    device S* u [[buffer(7)]],
    constant RecomputeParameters& parameters [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(C == 16 || C == 32 || C == 64, "a chunk has 16, 32 or 64 tokens");
  static_assert(K >= 1 && K <= 256 && V >= 1 && V <= 512, "K is at most 256 and V at most 512");
  constexpr int kThreads = 2 * C;
  constexpr int kStride = C + 4;
  threadgroup float inverse[C * kStride];
  threadgroup float value_scale[C];
  threadgroup float key_scale[C];
  threadgroup T tile[C * tile_stride<T>(C / 2)];

  const Chunk chunk = locate_chunk(bounds, parameters.sequence, int(group.x), int(group.z), C, lane);
  const int64_t token = int64_t(chunk.batch) * parameters.sequence.tokens + chunk.first;
  const int64_t head = int64_t(group.y);
  const int64_t key_head = key_head_of(int(group.y), parameters.heads);
  const int64_t row = token * parameters.value_heads + head;

  for (int item = int(thread_index); item < C * C; item += kThreads) {
    const int i = item / C;
    const int j = item % C;
    const int64_t source = (row + int64_t(i) * parameters.value_heads) * C + j;
    inverse[i * kStride + j] = i >= j && i < chunk.tokens ? A[source] : 0.0f;
  }
  if (int(thread_index) < C) {
    const int i = int(thread_index);
    const int64_t source = row + int64_t(i) * parameters.value_heads;
    value_scale[i] = i < chunk.tokens ? beta[source] : 0.0f;
    key_scale[i] = i < chunk.tokens ? beta[source] * exp(g[source]) : 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const LanePosition at = lane_position(lane);
  multiply_inverse<V, C, Width>(
      inverse, value_scale, tile,
      v + chunk.batch * parameters.v.batch + chunk.first * parameters.v.token + head * parameters.v.head,
      parameters.v.token, u + row * V, int64_t(parameters.value_heads) * V, chunk.tokens, thread_index, simdgroup, at);
  multiply_inverse<K, C, Width>(
      inverse, key_scale, tile,
      k + chunk.batch * parameters.k.batch + chunk.first * parameters.k.token + key_head * parameters.k.head,
      parameters.k.token, w + row * K, int64_t(parameters.value_heads) * K, chunk.tokens, thread_index, simdgroup, at);
}
