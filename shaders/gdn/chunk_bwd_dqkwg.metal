// Computes the gradients of q_read, k_read, k_write and last, as FLA's chunk_bwd_dqkwg those of q, k, w and g. They
// replace q_read, k_read and k_write. A threadgroup owns 32, 64 or 96 channels of one chunk of one value head, and
// takes 32 columns of V at a time. Each simdgroup owns 8 channels. Registers: three results of those channels; 32
// columns of their S and dS. Threadgroup memory: 32 columns of d_o, du and r. Layout: values, keys, channels and betas
// as in chunk_bwd.h; h and dh as in chunk_bwd_h.
//     dq_read = d_o S^T;  dk_read = -(beta du) S^T;  dk_write = (beta r) dS^T;  dlast = last sum_v S dS
#include "core/exponential.h"
#include "gdn/chunk_bwd_walk.h"

template <int Threads>
[[kernel, max_total_threads_per_threadgroup(Threads)]] void chunk_bwd_dqkwg(
    device const float* values [[buffer(0)]],
    device const float* h [[buffer(1)]],
    device const float* dh [[buffer(2)]],
    device const float* betas [[buffer(3)]],
    device const int* cu_seqlens [[buffer(4)]],
    device float* keys [[buffer(5)]],
    device float* channels [[buffer(6)]],
    constant ChunkBwdParameters& parameters [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(Threads % kBwdThreads == 0, "a simdgroup owns 8 channels, and the threadgroup whole slices");
  constexpr int kStride = tile_stride<float>(kBwdSlice);
  constexpr int kChannels = Threads / 4;
  alignas(16) threadgroup float outer[kBwdChunk * kStride];
  alignas(16) threadgroup float gradients[kBwdChunk * kStride];
  alignas(16) threadgroup float residuals[kBwdChunk * kStride];

  const int slices = parameters.key_columns / kChannels;
  const int row = int(group.x) / slices;
  const int slice = int(group.x) % slices * kChannels;
  const int64_t matrices = matrices_of(parameters, int64_t(group.z), row, int64_t(group.y));
  const LanePosition at = lane_position(lane);
  const int columns = parameters.value_columns;
  const Chunk chunk = own_chunk(cu_seqlens, parameters, uint(row), group.z, lane);
  device const float* beta = betas + matrices * kBwdChunk;
  device const float* planes = values + value_plane(parameters, matrices, 0);
  const int own = slice + int(simdgroup) * 8;
  const bool has_state = chunk.tokens > 0 && own < parameters.key_rows;  // a surplus chunk has none
  const int64_t first_state = matrices * state_floats(parameters);

  float2 dq_read[kBlocks], dk_read[kBlocks], dk_write[kBlocks];
  UNROLL for (int block = 0; block < kBlocks; ++block) {
    dq_read[block] = float2(0.0f);
    dk_read[block] = float2(0.0f);
    dk_write[block] = float2(0.0f);
  }
  float2 last_sum = float2(0.0f);
  for (int column = 0; column < columns; column += kBwdSlice) {
    float2 state[kBwdSlice / 8], gradient[kBwdSlice / 8];
    UNROLL for (int depth = 0; depth < kBwdSlice / 8; ++depth) {
      const int64_t block = first_state + state_block(parameters, own, column + depth * 8);
      state[depth] = has_state ? load_transposed_block(h + block, at) : float2(0.0f);
      gradient[depth] = has_state ? load_transposed_block(dh + block, at) : float2(0.0f);
    }
    device const float* source = planes + column;
    const int64_t plane = int64_t(kBwdChunk) * columns;
    stage_rows<kBwdChunk, kBwdSlice, 4, Threads>(
        outer, source + kBwdDo * plane, columns, kBwdChunk, kBwdSlice, thread_index);
    stage_rows<kBwdChunk, kBwdSlice, 4, Threads>(
        gradients, source + kBwdDu * plane, columns, kBwdChunk, kBwdSlice, thread_index);
    stage_rows<kBwdChunk, kBwdSlice, 4, Threads>(
        residuals, source + kBwdR * plane, columns, kBwdChunk, kBwdSlice, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int depth = 0; depth < kBwdSlice / 8; ++depth) {
      UNROLL for (int block = 0; block < kBlocks; ++block) {
        const int corner = block * 8 * kStride + depth * 8;
        multiply_add(dq_read[block], load_even_fragment(outer + corner, kStride, at), state[depth]);
        multiply_add(dk_read[block], load_even_fragment(gradients + corner, kStride, at), state[depth]);
        multiply_add(dk_write[block], load_even_fragment(residuals + corner, kStride, at), gradient[depth]);
      }
      last_sum += state[depth] * gradient[depth];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  UNROLL for (ushort row = 1; row < 8; row *= 2) last_sum += simd_shuffle_xor(last_sum, lane_at(row, 0));
  if (at.row == 0) {
    device const float* last = channels + channel_plane(parameters, matrices, kBwdLast) + own + at.column;
    device float* dlast = channels + channel_plane(parameters, matrices, kBwdDlast) + own + at.column;
    dlast[0] = gate_exp(last[0]) * last_sum.x;
    dlast[1] = gate_exp(last[1]) * last_sum.y;
  }

  const int64_t stride = parameters.key_columns;
  UNROLL for (int block = 0; block < kBlocks; ++block) {
    const int64_t place = int64_t(own) + block * 8 * stride;
    const float row_beta = beta[block * 8 + at.row];
    store_even_fragment(keys + key_plane(parameters, matrices, kBwdDqRead) + place, stride, 8, at, dq_read[block]);
    store_even_fragment(
        keys + key_plane(parameters, matrices, kBwdDkRead) + place, stride, 8, at, -row_beta * dk_read[block]);
    store_even_fragment(
        keys + key_plane(parameters, matrices, kBwdDkWrite) + place, stride, 8, at, row_beta * dk_write[block]);
  }
}
