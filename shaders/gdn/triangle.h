// A lower triangular [C, C] f32 matrix in threadgroup memory. It stores the 8x8 blocks on and below the diagonal, row
// by row (9 KB at C = 64). Within a block, the rows are permuted by the block's column: a row of the matrix lies in
// several blocks, and should hit different banks. Simdgroup s of C/16 owns block rows s and C/8-1-s, so that each
// simdgroup owns the same number of blocks.
#pragma once
#include "core/fragment.h"
#include "core/tile.h"

template <int C>
METAL_FUNC constexpr int triangle_floats() {
  return (C / 8) * (C / 8 + 1) / 2 * 64;
}

METAL_FUNC int triangle_block(int row, int column) { return (row * (row + 1) / 2 + column) * 64; }

METAL_FUNC int row_of_block(int i, int block_column) { return (i ^ block_column) % 8; }

METAL_FUNC int triangle_element(int i, int j) {
  return triangle_block(i / 8, j / 8) + row_of_block(i, j / 8) * 8 + j % 8;
}

METAL_FUNC int triangle_fragment(int row, int column, LanePosition at) {
  return triangle_block(row, column) + row_of_block(at.row, column) * 8 + at.column;
}

METAL_FUNC float2 load_triangle(threadgroup const float* triangle, int row, int column, LanePosition at) {
  return *(threadgroup const float2*)(triangle + triangle_fragment(row, column, at));
}

METAL_FUNC void store_triangle(threadgroup float* triangle, int row, int column, LanePosition at, float2 values) {
  *(threadgroup float2*)(triangle + triangle_fragment(row, column, at)) = values;
}

// Returns block n of the C/8+1 blocks that a simdgroup owns: first those of the low row, then those of the high row.
struct BlockPosition {
  int row;
  int column;
};

template <int C>
METAL_FUNC BlockPosition own_block(uint simdgroup, int n) {
  const int low_row = int(simdgroup);
  return {n <= low_row ? low_row : C / 8 - 1 - low_row, n <= low_row ? n : n - low_row - 1};
}

// Computes products += left right^T for tiles [C, Columns], in the simdgroup's blocks.
template <int C, int Columns, typename T>
METAL_FUNC void add_lower_products(
    thread float2* products, threadgroup const T* left, threadgroup const T* right, uint simdgroup, LanePosition at) {
  constexpr int kStride = tile_stride<T>(Columns);
  const int low_row = int(simdgroup);
  const int high_row = C / 8 - 1 - low_row;
  for (int depth = 0; depth < Columns; depth += 8) {
    const float2 low = load_even_fragment(left + low_row * 8 * kStride + depth, kStride, at);
    const float2 high = load_even_fragment(left + high_row * 8 * kStride + depth, kStride, at);
    UNROLL for (int n = 0; n <= C / 8; ++n) {
      const int column = own_block<C>(simdgroup, n).column;
      const float2 other = load_transposed(right + column * 8 * kStride + depth, kStride, at);
      multiply_add(products[n], n <= low_row ? low : high, other);
    }
  }
}

// Combines the inverses of N-row blocks into those of 2N rows: [L11 0; L21 L22]^-1 = [X11 0; -X22 L21 X11  X22]. A
// simdgroup owns 8 columns of a pair of blocks.
template <int N>
METAL_FUNC void merge_inverses(threadgroup float* triangle, uint simdgroup, LanePosition at) {
  constexpr int kBlocks = N / 8;
  const int upper = int(simdgroup) / kBlocks * 2 * kBlocks;  // block row of X11
  const int lower = upper + kBlocks;                         // block row of X22 and of L21, which is overwritten
  const int column = int(simdgroup) % kBlocks;

  float2 product[kBlocks];
  UNROLL for (int row = 0; row < kBlocks; ++row) product[row] = float2(0.0f);
  UNROLL for (int depth = 0; depth < kBlocks; ++depth) {
    const float2 right = depth < column ? float2(0.0f) : load_triangle(triangle, upper + depth, upper + column, at);
    UNROLL for (int row = 0; row < kBlocks; ++row) {
      multiply_add(product[row], load_triangle(triangle, lower + row, upper + depth, at), right);
    }
  }
  float2 result[kBlocks];
  UNROLL for (int row = 0; row < kBlocks; ++row) {
    result[row] = float2(0.0f);
    UNROLL for (int depth = 0; depth <= row; ++depth) {
      const float2 left = load_triangle(triangle, lower + row, lower + depth, at);
      multiply_add(result[row], left, product[depth]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (int row = 0; row < kBlocks; ++row) {
    store_triangle(triangle, lower + row, upper + column, at, -result[row]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Replaces each 8-row diagonal block of A by the inverse of that block of I + A, by forward substitution.
template <int C>
METAL_FUNC void invert_diagonal(threadgroup float* triangle, uint thread_index) {
  // Thread t < C solves column t % 8 of diagonal block t / 8: x_i = [i == j] - sum over m < i of A_im x_m.
  threadgroup float* block =
      triangle + triangle_block(int(thread_index) / 8 % (C / 8), int(thread_index) / 8 % (C / 8));
  const int column = int(thread_index) % 8;
  float x[8];
  UNROLL for (int i = 0; i < 8; ++i) x[i] = 0.0f;  // otherwise the last triangle's values would stay in registers
  if (int(thread_index) < C) {
    UNROLL for (int i = 0; i < 8; ++i) {
      x[i] = i == column ? 1.0f : 0.0f;
      UNROLL for (int m = 0; m < i; ++m) x[i] -= block[row_of_block(i, int(thread_index) / 8) * 8 + m] * x[m];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (int(thread_index) < C) {
    UNROLL for (int i = 0; i < 8; ++i) block[row_of_block(i, int(thread_index) / 8) * 8 + column] = x[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Computes (I + A)^-1 in place. With repeated keys and beta = 1.9, the error is 1e-6; that of a Neumann series is
// 2.5e-2.
template <int C>
METAL_FUNC void invert_triangle(threadgroup float* triangle, uint thread_index, uint simdgroup, LanePosition at) {
  invert_diagonal<C>(triangle, thread_index);
  merge_inverses<8>(triangle, simdgroup, at);
  if (C >= 32) merge_inverses<16>(triangle, simdgroup, at);
  if (C >= 64) merge_inverses<32>(triangle, simdgroup, at);
}

// Loads the simdgroup's [C, 8 Sides] columns of a tile, and multiplies row i by scale[i].
template <int C, int Sides, int Columns, typename T>
METAL_FUNC void load_operand(
    thread float2* operand,
    threadgroup const T* tile,
    threadgroup const float* scale,
    uint simdgroup,
    LanePosition at) {
  constexpr int kStride = tile_stride<T>(Columns);
  UNROLL for (int depth = 0; depth < C / 8; ++depth) {
    const float row_scale = scale[depth * 8 + at.row];
    UNROLL for (int side = 0; side < Sides; ++side) {
      const int column = (int(simdgroup) * Sides + side) * 8;
      operand[depth * Sides + side] = load_even_fragment(tile + depth * 8 * kStride + column, kStride, at) * row_scale;
    }
  }
}

// Computes tile = (I + A)^-1 operand in the simdgroup's columns, and overwrites the operand. Call invert_diagonal()
// first. With repeated keys and beta = 1.9, the error is half that of a product with the whole inverse, which takes as
// many multiplications.
template <int C, int Sides, int Columns, typename T>
METAL_FUNC void solve_triangle(
    threadgroup T* tile, threadgroup const float* triangle, thread float2* operand, uint simdgroup, LanePosition at) {
  constexpr int kStride = tile_stride<T>(Columns);
  threadgroup T* own = tile + int(simdgroup) * Sides * 8;
  UNROLL for (int row = 0; row < C / 8; ++row) {
    UNROLL for (int depth = 0; depth < row; ++depth) {
      const float2 left = load_triangle(triangle, row, depth, at);
      UNROLL for (int side = 0; side < Sides; ++side) {
        multiply_add(operand[row * Sides + side], left, operand[depth * Sides + side]);
      }
    }
    const float2 inverse = load_triangle(triangle, row, row, at);
    UNROLL for (int side = 0; side < Sides; ++side) {
      float2 solution = float2(0.0f);
      multiply_add(solution, inverse, operand[row * Sides + side]);
      store_even_fragment(own + row * 8 * kStride + side * 8, kStride, at, solution);
      operand[row * Sides + side] = -solution;
    }
  }
}

// Computes target = (I + A)^-1 source in the first `columns` columns of a slice, where row i of the source is
// multiplied by scale[i]. Source and target may be the same. The tile first holds the source's rows, then the result's.
template <int C, int Sides, int Columns, int Width, int Threads, typename Source, typename Target>
METAL_FUNC void solve_slice(
    device Target* target,
    int64_t target_stride,
    device const Source* source,
    int64_t source_stride,
    threadgroup Target* tile,
    threadgroup const float* triangle,
    threadgroup const float* scale,
    int tokens,
    int columns,
    uint thread_index,
    uint simdgroup,
    LanePosition at) {
  threadgroup Source* source_tile = (threadgroup Source*)tile;
  float2 operand[C / 8 * Sides];
  stage_rows<C, Columns, Width, Threads>(source_tile, source, source_stride, tokens, columns, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  load_operand<C, Sides, Columns>(operand, source_tile, scale, simdgroup, at);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  solve_triangle<C, Sides, Columns>(tile, triangle, operand, simdgroup, at);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  write_rows<C, Columns, Width, Threads>(target, tile, target_stride, tokens, columns, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
