// What the two walks through the chunks of a segment share: products of a chunk's keys with a state in registers.
#pragma once
#include "core/tile.h"
#include "gdn/chunk_bwd_segment.h"
#include "gdn/state_blocks.h"

enum { kBlocks = kBwdChunk / 8, kSquareStride = kBwdChunk + 4, kSquareFloats = kBwdChunk * kSquareStride };
static_assert(kBwdThreads == kStateThreads && kBwdSlice == kStateColumns, "128 threads own a slice of V");

METAL_FUNC constexpr int square_block(int row, int column) { return row * 8 * kSquareStride + column * 8; }

// The floats of threadgroup memory for 8 rows of keys, or 8 rows of a slice of S.
METAL_FUNC constexpr int walk_floats(int K) {
  return 8 * (whole_blocks(K) + 4) > 8 * kStateColumns ? 8 * (whole_blocks(K) + 4) : 8 * kStateColumns;
}

// How many planes of keys there is room for. With two, one is staged while another is read.
METAL_FUNC constexpr int key_buffers(int K, int threads) { return K <= 128 && threads > kBwdThreads ? 2 : 1; }

// The floats for planes of keys, or for a part of a state of each slice.
METAL_FUNC constexpr int walk_rows(int K, int threads) {
  const int blocks = kBlocks * key_buffers(K, threads), slices = threads / kBwdThreads;
  return walk_floats(K) * (slices > blocks ? slices : blocks);
}

template <int Threads = kBwdThreads>
METAL_FUNC void stage_square(threadgroup float* tile, device const float* square, uint thread_index) {
  stage_rows<kBwdChunk, kBwdChunk, 4, Threads>(tile, square, kBwdChunk, kBwdChunk, kBwdChunk, thread_index);
}

// Stages the decay of a chunk for each channel: a factor, and 1 if it is weak.
template <int K, int Threads>
METAL_FUNC void stage_decays(threadgroup float2* decays, device const float* log_decays, uint thread_index) {
  for (uint channel = thread_index; channel < uint(whole_blocks(K)); channel += Threads) {
    const Decay decay = decay_from_log(log_decays[channel]);
    decays[channel] = float2(decay.factor, decay.weak ? 1.0f : 0.0f);
  }
}

METAL_FUNC float2 decayed(float2 state, float2 decay) {
  const float2 change = decay.x * state;
  return decay.y * state + change;
}

// Both functions move S of a simdgroup, whose first block is at `blocks`.
template <int K>
METAL_FUNC void load_blocks(thread float2* state, device const float* blocks, uint lane) {
  UNROLL for (int depth = 0; depth < K / 8; ++depth) {
    state[depth] = *(device const float2*)(blocks + depth * 64 + int(lane) * 2);
  }
}

template <int K>
METAL_FUNC void store_blocks(thread const float2* state, device float* blocks, uint lane) {
  UNROLL for (int depth = 0; depth < K / 8; ++depth) {
    *(device float2*)(blocks + depth * 64 + int(lane) * 2) = state[depth];
  }
}

// Loads a block as the fragment of its transpose.
METAL_FUNC float2 load_transposed_block(device const float* block, LanePosition at) {
  device const float* own = block + lane_at(at.column, at.row & 6) * 2 + (at.row & 1);
  return float2(own[0], own[4]);  // two lanes further, the next row of the block
}

// Stages a plane of keys, and returns where it is. The planes of two calls in turn differ in `parity`, or a barrier is
// between them.
template <int K, int Threads>
METAL_FUNC threadgroup const float* stage_keys(
    threadgroup float* rows,
    device const float* keys,
    constant ChunkBwdParameters& parameters,
    int parity,
    uint thread_index) {
  constexpr int kColumns = whole_blocks(K), kBuffers = key_buffers(K, Threads);
  threadgroup float* staged = rows + parity % kBuffers * kBwdChunk * tile_stride<float>(kColumns);
  if (kBuffers == 1) threadgroup_barrier(mem_flags::mem_threadgroup);
  stage_rows<kBwdChunk, kColumns, 4, Threads>(staged, keys, parameters.key_columns, kBwdChunk, kColumns, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return staged;
}

// Returns keys S in `sums`. The sums of blocks alternate, so that few fragments are live.
template <int K, int Threads>
METAL_FUNC void read_state(
    thread float2* sums,
    thread const float2* state,
    threadgroup float* rows,
    device const float* keys,
    constant ChunkBwdParameters& parameters,
    int parity,
    uint thread_index,
    LanePosition at) {
  constexpr int kStride = tile_stride<float>(whole_blocks(K));
  threadgroup const float* staged = stage_keys<K, Threads>(rows, keys, parameters, parity, thread_index);
  UNROLL for (int block = 0; block < kBlocks; ++block) sums[block] = float2(0.0f);
  UNROLL for (int depth = 0; depth < whole_blocks(K) / 8; ++depth) {
    UNROLL for (int block = 0; block < kBlocks; ++block) {
      multiply_add(sums[block], load_even_fragment(staged + (block * kStride + depth) * 8, kStride, at), state[depth]);
    }
  }
}

// Adds keys, transposed, times `values` to S, which decays before if `Decays`. The decays are read where they are used,
// because 16 of them at once take 32 registers.
template <int K, int Threads, bool Decays>
METAL_FUNC void write_state(
    thread float2* state,
    threadgroup const float2* decays,
    threadgroup float* rows,
    device const float* keys,
    constant ChunkBwdParameters& parameters,
    int parity,
    thread const float2* values,
    uint thread_index,
    LanePosition at) {
  constexpr int kStride = tile_stride<float>(whole_blocks(K));
  threadgroup const float* staged = stage_keys<K, Threads>(rows, keys, parameters, parity, thread_index);
  UNROLL for (int depth = 0; depth < whole_blocks(K) / 8; ++depth) {
    if (Decays) state[depth] = decayed(state[depth], decays[depth * 8 + at.row]);
    UNROLL for (int block = 0; block < kBlocks; ++block) {
      float2 update = float2(0.0f);  // over 8 tokens, rounded once: each term may be small compared with S
      multiply_add(update, load_transposed(staged + (block * kStride + depth) * 8, kStride, at), values[block]);
      state[depth] += update;
    }
  }
}
