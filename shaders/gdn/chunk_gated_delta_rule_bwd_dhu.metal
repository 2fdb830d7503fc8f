// Walks back through the chunks of a segment, as FLA's chunk_gated_delta_rule_bwd_dhu. It leaves the gradient of the
// state after each chunk, and completes du. A threadgroup owns 32 value columns of one head of one sequence. Each of
// its 4 simdgroups owns 8 columns. Registers: dS [K, 8] for all chunks, and du of a chunk. Threadgroup memory: 8 rows
// of keys, which also moves dS, and the inverse. Layout: keys, values, squares, channels, betas and dh as in
// chunk_bwd.h; states with any strides; carried [B, HV, ...].
//     du <- inverse^T (du + k_write dS);  dS <- last dS + q_read^T d_o - k_read^T (beta du)
#include "gdn/chunk_bwd_walk.h"

template <int K>
[[kernel]] void chunk_gated_delta_rule_bwd_dhu(
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
  constexpr int kPadded = whole_blocks(K);
  constexpr int kKeys = staged_keys(walk_floats(K));
  alignas(16) threadgroup float rows[walk_floats(K)];
  alignas(16) threadgroup float inverse[kSquareFloats];

  const SequenceRows own = own_rows(cu_seqlens, parameters, group.z, lane);
  const LanePosition at = lane_position(lane);
  const int64_t head = group.y;
  const int column = int(group.x) * kStateColumns;
  const int own_column = column + int(simdgroup) * 8;
  const int own_values = min(kStateColumns, parameters.value_size - column);
  const int stride = parameters.value_columns;
  const StateStrides kept = kept_strides(parameters);
  const int64_t carried = (own.batch * parameters.value_heads + head) * kept.head + column;

  float2 state[kPadded / 8];
  UNROLL for (int depth = 0; depth < kPadded / 8; ++depth) state[depth] = float2(0.0f);
  if (own.is_here && own.ends_here && parameters.has_final_gradient != 0) {
    device const float* source = final_gradient + int64_t(group.z) * parameters.final_gradient.sequence +
                                 head * parameters.final_gradient.head + column * parameters.final_gradient.value;
    load_state<K, kKeys>(state, source, parameters.final_gradient, own_values, rows, thread_index, simdgroup, at);
  } else if (own.is_here && !own.ends_here) {
    load_state<kPadded, kKeys>(state, carried_in + carried, kept, kStateColumns, rows, thread_index, simdgroup, at);
  }

  for (int64_t row = own.to - 1; row >= own.from; --row) {
    const int64_t matrices = matrices_of(parameters, own.batch, row, head);
    device const float* q_read = keys + key_plane(parameters, matrices, kBwdQRead);
    device const float* k_read = keys + key_plane(parameters, matrices, kBwdKRead);
    device const float* k_write = keys + key_plane(parameters, matrices, kBwdKWrite);
    device const float* beta = betas + matrices * kBwdChunk;
    device float* gradients = values + value_plane(parameters, matrices, kBwdDu) + own_column;
    device const float* d_o = values + value_plane(parameters, matrices, kBwdDo) + own_column;
    store_state<kPadded, kKeys>(
        state, dh + matrices * kept.head + column, kept, kStateColumns, rows, thread_index, simdgroup, at);
    stage_square(inverse, squares + square_plane(matrices, kBwdInverse), thread_index);

    float2 dv_new[kBlocks], du[kBlocks];
    UNROLL for (int block = 0; block < kBlocks; ++block) {
      dv_new[block] = load_even_fragment(gradients + int64_t(block) * 8 * stride, stride, 8, at);
      dv_new[block] += read_state<K>(state, rows, k_write, parameters, block, thread_index, at);
    }
    decay_channels<K>(state, channels + channel_plane(parameters, matrices, kBwdLast), at);
    UNROLL for (int block = 0; block < kBlocks; ++block) {
      du[block] = float2(0.0f);
      UNROLL for (int depth = block; depth < kBlocks; ++depth) {
        multiply_add(
            du[block], load_transposed(inverse + square_block(depth, block), kSquareStride, at), dv_new[depth]);
      }
      store_even_fragment(gradients + int64_t(block) * 8 * stride, stride, 8, at, du[block]);
      const float2 outer = load_even_fragment(d_o + int64_t(block) * 8 * stride, stride, 8, at);
      write_state<K>(state, rows, q_read, parameters, block, outer, thread_index, at);
      write_state<K>(state, rows, k_read, parameters, block, -beta[block * 8 + at.row] * du[block], thread_index, at);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (own.is_here && !own.starts_here) {
    store_state<kPadded, kKeys>(state, carried_out + carried, kept, kStateColumns, rows, thread_index, simdgroup, at);
  } else if (own.is_here && parameters.has_initial_gradient != 0) {
    device float* target = initial_gradient + int64_t(group.z) * parameters.initial_gradient.sequence +
                           head * parameters.initial_gradient.head + column * parameters.initial_gradient.value;
    store_state<K, kKeys>(state, target, parameters.initial_gradient, own_values, rows, thread_index, simdgroup, at);
  }
}
