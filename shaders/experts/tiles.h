// Multiplies a tile of up to kTilePairs vectors by kTileColumns rows of each of two matrices, with matrix instructions.
// A simdgroup owns 8 rows of each matrix. Threadgroup memory: kTileDepth columns of the vectors and of the decoded
// rows. Registers: the products sums[half * 4 + block], with 8 vectors per block, in f32.
#pragma once
#include "experts/pairs.h"
#include "experts/parameters.h"
#include "experts/weights.h"

GDN_CONSTANT int kTileBlocks = kTilePairs / 8;

// The pairs of a threadgroup's tile, or tokens for the shared expert.
struct OwnTile {
  int expert;  // E for the shared expert, kLeftOut for pairs without an expert
  int rows;    // 0 if the tile is surplus
  int first;
};

METAL_FUNC OwnTile locate_tile(device const PairTile* tiles, constant PairParameters& pairs, int tile) {
  if (tile >= pairs.tiles) {
    const int first = int(min(int64_t(tile - pairs.tiles) * kTilePairs, int64_t(pairs.tokens)));
    return {pairs.experts, min(kTilePairs, pairs.tokens - first), first};
  }
  const PairTile stored = tiles[tile];
  return {stored.expert == pairs.experts ? kLeftOut : stored.expert, stored.rows, stored.first};
}

// Stores the numbers of the tile's pairs in threadgroup memory. The caller needs a barrier after this.
METAL_FUNC void load_pairs(
    threadgroup int* pair_of_row,
    device const int* sorted_pairs,
    constant PairParameters& pairs,
    OwnTile tile,
    uint thread_index) {
  const int row = int(thread_index);
  if (row < tile.rows)
    pair_of_row[row] = tile.expert == pairs.experts ? tile.first + row : sorted_pairs[tile.first + row];
}

template <typename T>
METAL_FUNC constexpr int size_of_tile() {
  return kTilePairs * tile_stride<T>(kTileDepth);
}

// Stages the vectors of the tile's pairs, with zeros past the last one.
template <int Width, typename T>
METAL_FUNC void stage_vectors(
    threadgroup T* tile,
    thread const VectorRows<T>& vectors,
    threadgroup const int* pair_of_row,
    int rows,
    int column,
    int columns,
    uint thread_index) {
  typedef typename VectorOf<T, Width>::type Vector;
  constexpr int kVectors = kTileDepth / Width;
  for (int item = int(thread_index); item < kTilePairs * kVectors; item += kTileThreads) {
    const int row = staged_row<kTilePairs, kTileDepth, T>(uint(item / kVectors));
    const int at = item % kVectors * Width;
    Vector values = Vector(T(0));
    if (row < rows && column + at < columns) {
      values = *(device const Vector*)(vectors.for_pair(pair_of_row[row]) + column + at);
    }
    *(threadgroup Vector*)(tile + row * tile_stride<T>(kTileDepth) + at) = values;
  }
}

template <typename T, int Bits, int Width>
METAL_FUNC void multiply_tile(
    thread float2* sums,
    threadgroup T* staged_vectors,
    threadgroup uchar* staged_weights,
    Weights<T, Bits, Width> first,
    Weights<T, Bits, Width> second,
    VectorRows<T> vectors,
    threadgroup const int* pair_of_row,
    int rows,
    int columns,
    uint thread_index,
    uint simdgroup,
    LanePosition at) {
  constexpr int kStride = tile_stride<T>(kTileDepth);
  UNROLL for (int i = 0; i < 2 * kTileBlocks; ++i) sums[i] = float2(0.0f);
  for (int column = 0; column < columns; column += kTileDepth) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_vectors<Width>(staged_vectors, vectors, pair_of_row, rows, column, columns, thread_index);
    first.stage(staged_weights, column, columns, thread_index);
    second.stage(staged_weights + staged_bytes<T, Bits>(), column, columns, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int depth = 0; depth < kTileDepth; depth += 8) {
      const float2 upper = first.load_weights(staged_weights, int(simdgroup) * 8, depth, at);
      const float2 lower = second.load_weights(staged_weights + staged_bytes<T, Bits>(), int(simdgroup) * 8, depth, at);
      UNROLL for (int block = 0; block < kTileBlocks; ++block) {
        if (block * 8 < rows) {  // most tiles of a decoding batch have few rows
          const float2 x = load_even_fragment(staged_vectors + block * 8 * kStride + depth, kStride, at);
          multiply_add(sums[block], x, upper);
          multiply_add(sums[kTileBlocks + block], x, lower);
        }
      }
    }
  }
}
