// Walks forward through the chunks of a segment. It leaves the state before each chunk, and r in place of v. A
// threadgroup owns 32 value columns of one head of one sequence. Each of its 4 simdgroups owns 8 columns.
// Registers: S [K, 8] for all chunks, and r of a chunk. Threadgroup memory: 8 rows of k_read or k_write, which also
// moves S; L and the inverse.
// Layout: keys, values, squares, channels, betas and h as in chunk_bwd.h; states with any strides; carried [B, HV,
// ...].
//     x = v - k_read S;  u = inverse (beta x);  r = x - L u;  S <- last S + k_write^T (beta r)
#include "gdn/chunk_bwd_walk.h"

template <int K>
[[kernel]] void chunk_bwd_h(
    device const float* keys [[buffer(0)]],
    device const float* squares [[buffer(1)]],
    device const float* channels [[buffer(2)]],
    device const float* betas [[buffer(3)]],
    device const float* initial_state [[buffer(4)]],
    device const float* carried_in [[buffer(5)]],
    device const int* cu_seqlens [[buffer(6)]],
    device float* values [[buffer(7)]],
    device float* h [[buffer(8)]],
    device float* carried_out [[buffer(9)]],
    constant ChunkBwdParameters& parameters [[buffer(10)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(K >= 1 && K <= 256, "K is at most 256");
  constexpr int kPadded = whole_blocks(K);
  constexpr int kKeys = staged_keys(walk_floats(K));
  alignas(16) threadgroup float rows[walk_floats(K)];
  alignas(16) threadgroup float L[kSquareFloats];
  alignas(16) threadgroup float inverse[kSquareFloats];

  const SequenceRows own = own_rows(cu_seqlens, parameters, group.z, lane);
  const LanePosition at = lane_position(lane);
  const int64_t head = group.y;
  const int column = int(group.x) * kStateColumns;
  const int own_column = column + int(simdgroup) * 8;
  const int stride = parameters.value_columns;
  const StateStrides kept = kept_strides(parameters);
  const int64_t carried = (own.batch * parameters.value_heads + head) * kept.head + column;

  float2 state[kPadded / 8];
  UNROLL for (int depth = 0; depth < kPadded / 8; ++depth) state[depth] = float2(0.0f);
  if (own.is_here && own.starts_here && parameters.has_initial_state != 0) {
    device const float* source = initial_state + int64_t(group.z) * parameters.initial_state.sequence +
                                 head * parameters.initial_state.head + column * parameters.initial_state.value;
    load_state<K, kKeys>(
        state, source, parameters.initial_state, min(kStateColumns, parameters.value_size - column), rows, thread_index,
        simdgroup, at);
  } else if (own.is_here && !own.starts_here) {
    load_state<kPadded, kKeys>(state, carried_in + carried, kept, kStateColumns, rows, thread_index, simdgroup, at);
  }

  for (int64_t row = own.from; row < own.to; ++row) {
    const int64_t matrices = matrices_of(parameters, own.batch, row, head);
    device const float* k_read = keys + key_plane(parameters, matrices, kBwdKRead);
    device const float* k_write = keys + key_plane(parameters, matrices, kBwdKWrite);
    device const float* beta = betas + matrices * kBwdChunk;
    device float* own_values = values + value_plane(parameters, matrices, kBwdR) + own_column;
    store_state<kPadded, kKeys>(
        state, h + matrices * kept.head + column, kept, kStateColumns, rows, thread_index, simdgroup, at);
    stage_square(L, squares + square_plane(matrices, kBwdL), thread_index);
    stage_square(inverse, squares + square_plane(matrices, kBwdInverse), thread_index);

    float2 r[kBlocks], scaled[kBlocks], u[kBlocks];
    UNROLL for (int block = 0; block < kBlocks; ++block) {
      r[block] = load_even_fragment(own_values + int64_t(block) * 8 * stride, stride, 8, at);
      r[block] -= read_state<K>(state, rows, k_read, parameters, block, thread_index, at);
      scaled[block] = beta[block * 8 + at.row] * r[block];
    }
    UNROLL for (int block = 0; block < kBlocks; ++block) {
      u[block] = float2(0.0f);
      UNROLL for (int depth = 0; depth <= block; ++depth) {
        multiply_add(
            u[block], load_even_fragment(inverse + square_block(block, depth), kSquareStride, at), scaled[depth]);
      }
    }
    UNROLL for (int block = 0; block < kBlocks; ++block) {
      float2 product = float2(0.0f);
      UNROLL for (int depth = 0; depth <= block; ++depth) {
        multiply_add(product, load_even_fragment(L + square_block(block, depth), kSquareStride, at), u[depth]);
      }
      r[block] -= product;
      store_even_fragment(own_values + int64_t(block) * 8 * stride, stride, 8, at, r[block]);
    }
    decay_channels<K>(state, channels + channel_plane(parameters, matrices, kBwdLast), at);
    UNROLL for (int block = 0; block < kBlocks; ++block) {
      write_state<K>(state, rows, k_write, parameters, block, beta[block * 8 + at.row] * r[block], thread_index, at);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (parameters.has_carried != 0 && own.is_here && !own.ends_here) {
    store_state<kPadded, kKeys>(state, carried_out + carried, kept, kStateColumns, rows, thread_index, simdgroup, at);
  }
}
