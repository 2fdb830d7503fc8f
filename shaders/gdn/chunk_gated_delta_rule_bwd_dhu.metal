// Walks back through the chunks of a segment, as FLA's chunk_gated_delta_rule_bwd_dhu. It leaves the gradient of the
// state after each chunk, and completes du. Threadgroups, registers and threadgroup memory are those of chunk_bwd_h.
// Layout: as in chunk_bwd_h, with dh like h.
//     du <- inverse^T (du + k_write dS);  dS <- last dS + q_read^T d_o - k_read^T (beta du)
#include "gdn/chunk_bwd_walk.h"

template <int K, int Threads>
[[kernel, max_total_threads_per_threadgroup(Threads)]] void chunk_gated_delta_rule_bwd_dhu(
    device const float* keys [[buffer(0)]],
    device const float* squares [[buffer(1)]],
    device const float* channels [[buffer(2)]],
    device const float* betas [[buffer(3)]],
    device const float* final_gradient [[buffer(4)]],
    device const float* carried_in [[buffer(5)]],
    device const int* cu_seqlens [[buffer(6)]],
    device float* values [[buffer(7)]],
    device float* dh [[buffer(8)]],
    device float* carried_out [[buffer(9)]],
    device float* initial_gradient [[buffer(10)]],
    constant ChunkBwdParameters& parameters [[buffer(11)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(K >= 1 && K <= 256, "K is at most 256");
  static_assert(Threads % kBwdThreads == 0, "a threadgroup owns whole slices");
  constexpr int kPadded = whole_blocks(K);
  constexpr int kSlices = Threads / kBwdThreads;
  constexpr int kKeys = staged_keys(walk_floats(K));
  alignas(16) threadgroup float rows[walk_rows(K, Threads)];
  alignas(16) threadgroup float inverse[kSquareFloats];
  threadgroup float2 decays[kPadded];

  const SequenceRows own = own_rows(cu_seqlens, parameters, group.z, lane);
  const LanePosition at = lane_position(lane);
  const int64_t head = group.y;
  const uint slice = thread_index / kBwdThreads, in_slice = thread_index % kBwdThreads;
  const int column = int(group.x) * (kSlices * kStateColumns) + int(slice) * kStateColumns;
  const uint slice_simdgroup = simdgroup % (kBwdThreads / 32);
  const int own_column = column + int(slice_simdgroup) * 8;
  threadgroup float* scratch = rows + slice * walk_floats(K);  // moves S of the slice
  const int stride = parameters.value_columns;
  const int64_t state_size = state_floats(parameters), own_state = state_block(parameters, 0, own_column);

  float2 state[kPadded / 8];
  UNROLL for (int depth = 0; depth < kPadded / 8; ++depth) state[depth] = float2(0.0f);
  if (own.is_here && own.ends_here && parameters.has_final_gradient != 0) {
    device const float* source = final_gradient + int64_t(group.z) * parameters.final_gradient.sequence +
                                 head * parameters.final_gradient.head + column * parameters.final_gradient.value;
    load_state<K, kKeys>(
        state, source, parameters.final_gradient, min(kStateColumns, parameters.value_size - column), scratch, in_slice,
        slice_simdgroup, at);
  } else if (own.is_here && !own.ends_here) {
    const int64_t carried = own.batch * parameters.value_heads + head;
    load_blocks<kPadded>(state, carried_in + carried * state_size + own_state, lane);
  }

  for (int64_t row = own.to - 1; row >= own.from; --row) {
    const int64_t matrices = matrices_of(parameters, own.batch, row, head);
    device const float* q_read = keys + key_plane(parameters, matrices, kBwdQRead);
    device const float* k_read = keys + key_plane(parameters, matrices, kBwdKRead);
    device const float* k_write = keys + key_plane(parameters, matrices, kBwdKWrite);
    device const float* beta = betas + matrices * kBwdChunk;
    device float* gradients = values + value_plane(parameters, matrices, kBwdDu) + own_column;
    device const float* d_o = values + value_plane(parameters, matrices, kBwdDo) + own_column;
    store_blocks<kPadded>(state, dh + matrices * state_size + own_state, lane);
    stage_square<Threads>(inverse, squares + square_plane(matrices, kBwdInverse), thread_index);

    float2 dv_new[kBlocks], du[kBlocks], outer[kBlocks];
    read_state<K, Threads>(dv_new, state, rows, k_write, parameters, 0, thread_index, at);
    UNROLL for (int block = 0; block < kBlocks; ++block) {
      dv_new[block] += load_even_fragment(gradients + int64_t(block) * 8 * stride, stride, 8, at);
    }
    UNROLL for (int block = 0; block < kBlocks; ++block) {
      du[block] = float2(0.0f);
      UNROLL for (int depth = block; depth < kBlocks; ++depth) {
        multiply_add(
            du[block], load_transposed(inverse + square_block(depth, block), kSquareStride, at), dv_new[depth]);
      }
      store_even_fragment(gradients + int64_t(block) * 8 * stride, stride, 8, at, du[block]);
    }
    UNROLL for (int block = 0; block < kBlocks; ++block) {
      outer[block] = load_even_fragment(d_o + int64_t(block) * 8 * stride, stride, 8, at);
    }
    stage_decays<K, Threads>(decays, channels + channel_plane(parameters, matrices, kBwdLast), thread_index);
    write_state<K, Threads, true>(state, decays, rows, q_read, parameters, 1, outer, thread_index, at);
    UNROLL for (int block = 0; block < kBlocks; ++block) du[block] *= -beta[block * 8 + at.row];
    write_state<K, Threads, false>(state, decays, rows, k_read, parameters, 0, du, thread_index, at);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (own.is_here && !own.starts_here) {
    const int64_t carried = own.batch * parameters.value_heads + head;
    store_blocks<kPadded>(state, carried_out + carried * state_size + own_state, lane);
  } else if (own.is_here && parameters.has_initial_gradient != 0) {
    device float* target = initial_gradient + int64_t(group.z) * parameters.initial_gradient.sequence +
                           head * parameters.initial_gradient.head + column * parameters.initial_gradient.value;
    store_state<K, kKeys>(
        state, target, parameters.initial_gradient, min(kStateColumns, parameters.value_size - column), scratch,
        in_slice, slice_simdgroup, at);
  }
}
