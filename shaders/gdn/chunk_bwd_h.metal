// Walks forward through the chunks of a segment. It leaves the state before each chunk, and r in place of v. A
// threadgroup owns 1 to 4 slices of 32 value columns of one head of one sequence. Each simdgroup owns 8 columns.
// Registers: S [K, 8] for all chunks, and r of a chunk. Threadgroup memory: k_read or k_write of a chunk, or both if it
// owns several slices, whose place also moves S from and to the caller's tensors; L, the inverse and the decays.
// Layout: keys, values, squares, channels and betas as in chunk_bwd.h; h [B, rows, HV, ...] and carried [B, HV, ...] in
// blocks as in chunk_bwd_segment.h; other states with any strides.
//     x = v - k_read S;  u = inverse (beta x);  r = x - L u;  S <- last S + k_write^T (beta r)
#include "gdn/chunk_bwd_walk.h"

template <int K, int Threads>
[[kernel, max_total_threads_per_threadgroup(Threads)]] void chunk_bwd_h(
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
  static_assert(Threads % kBwdThreads == 0, "a threadgroup owns whole slices");
  constexpr int kPadded = whole_blocks(K);
  constexpr int kSlices = Threads / kBwdThreads;
  constexpr int kKeys = staged_keys(walk_floats(K));
  alignas(16) threadgroup float rows[walk_rows(K, Threads)];
  alignas(16) threadgroup float L[kSquareFloats];
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
  if (own.is_here && own.starts_here && parameters.has_initial_state != 0) {
    device const float* source = initial_state + int64_t(group.z) * parameters.initial_state.sequence +
                                 head * parameters.initial_state.head + column * parameters.initial_state.value;
    load_state<K, kKeys>(
        state, source, parameters.initial_state, min(kStateColumns, parameters.value_size - column), scratch, in_slice,
        slice_simdgroup, at);
  } else if (own.is_here && !own.starts_here) {
    const int64_t carried = own.batch * parameters.value_heads + head;
    load_blocks<kPadded>(state, carried_in + carried * state_size + own_state, lane);
  }

  for (int64_t row = own.from; row < own.to; ++row) {
    const int64_t matrices = matrices_of(parameters, own.batch, row, head);
    device const float* k_read = keys + key_plane(parameters, matrices, kBwdKRead);
    device const float* k_write = keys + key_plane(parameters, matrices, kBwdKWrite);
    device const float* beta = betas + matrices * kBwdChunk;
    device float* own_values = values + value_plane(parameters, matrices, kBwdR) + own_column;
    store_blocks<kPadded>(state, h + matrices * state_size + own_state, lane);
    stage_square<Threads>(L, squares + square_plane(matrices, kBwdL), thread_index);
    stage_square<Threads>(inverse, squares + square_plane(matrices, kBwdInverse), thread_index);

    float2 read[kBlocks], r[kBlocks], scaled[kBlocks], u[kBlocks];
    read_state<K, Threads>(read, state, rows, k_read, parameters, 0, thread_index, at);
    UNROLL for (int block = 0; block < kBlocks; ++block) {
      r[block] = load_even_fragment(own_values + int64_t(block) * 8 * stride, stride, 8, at) - read[block];
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
    UNROLL for (int block = 0; block < kBlocks; ++block) scaled[block] = beta[block * 8 + at.row] * r[block];
    stage_decays<K, Threads>(decays, channels + channel_plane(parameters, matrices, kBwdLast), thread_index);
    write_state<K, Threads, true>(state, decays, rows, k_write, parameters, 1, scaled, thread_index, at);
  }
  if (parameters.has_carried != 0 && own.is_here && !own.ends_here) {
    const int64_t carried = own.batch * parameters.value_heads + head;
    store_blocks<kPadded>(state, carried_out + carried * state_size + own_state, lane);
  }
}
