// What the two walks through the chunks of a segment share: products of 8 rows of keys with a state in registers.
#pragma once
#include "core/tile.h"
#include "gdn/chunk_bwd_segment.h"
#include "gdn/state_blocks.h"

enum { kBlocks = kBwdChunk / 8, kSquareStride = kBwdChunk + 4, kSquareFloats = kBwdChunk * kSquareStride };
static_assert(kBwdThreads == kStateThreads && kBwdSlice == kStateColumns, "a walk owns a slice of V");

METAL_FUNC constexpr int square_block(int row, int column) { return row * 8 * kSquareStride + column * 8; }

// The floats of threadgroup memory for 8 rows of keys, or 8 keys of a state.
METAL_FUNC constexpr int walk_floats(int K) {
  return 8 * (whole_blocks(K) + 4) > 8 * kStateColumns ? 8 * (whole_blocks(K) + 4) : 8 * kStateColumns;
}

METAL_FUNC void stage_square(threadgroup float* tile, device const float* square, uint thread_index) {
  stage_rows<kBwdChunk, kBwdChunk, 4, kBwdThreads>(tile, square, kBwdChunk, kBwdChunk, kBwdChunk, thread_index);
}

// Stages 8 rows of keys. The threadgroup has read the rows that were there, and may read these.
template <int K>
METAL_FUNC void stage_block(
    threadgroup float* rows,
    device const float* keys,
    constant ChunkBwdParameters& parameters,
    int block,
    uint thread_index) {
  const int64_t stride = parameters.key_columns;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  stage_rows<8, whole_blocks(K), 4, kBwdThreads>(
      rows, keys + block * 8 * stride, stride, 8, whole_blocks(K), thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Returns 8 rows of keys S.
template <int K>
METAL_FUNC float2 read_state(
    thread const float2* state,
    threadgroup float* rows,
    device const float* keys,
    constant ChunkBwdParameters& parameters,
    int block,
    uint thread_index,
    LanePosition at) {
  constexpr int kStride = tile_stride<float>(whole_blocks(K));
  stage_block<K>(rows, keys, parameters, block, thread_index);
  float2 read = float2(0.0f);
  UNROLL for (int depth = 0; depth < whole_blocks(K) / 8; ++depth) {
    multiply_add(read, load_even_fragment(rows + depth * 8, kStride, at), state[depth]);
  }
  return read;
}

// Adds 8 rows of keys, transposed, times `values` to S.
template <int K>
METAL_FUNC void write_state(
    thread float2* state,
    threadgroup float* rows,
    device const float* keys,
    constant ChunkBwdParameters& parameters,
    int block,
    float2 values,
    uint thread_index,
    LanePosition at) {
  constexpr int kStride = tile_stride<float>(whole_blocks(K));
  stage_block<K>(rows, keys, parameters, block, thread_index);
  UNROLL for (int depth = 0; depth < whole_blocks(K) / 8; ++depth) {
    float2 update = float2(0.0f);  // over 8 tokens, rounded once: each term may be small compared with S
    multiply_add(update, load_transposed(rows + depth * 8, kStride, at), values);
    state[depth] += update;
  }
}
