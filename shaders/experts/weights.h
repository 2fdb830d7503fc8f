// How the weights of a matrix are read: a kernel takes Bits as a template argument, 0 for numbers of T, 4 or 8 for
// packed codes, and reads both through Weights.
#pragma once
#include "core/matrix_parameters.h"
#include "core/packed.h"
#include "core/tile.h"
#include "experts/tile_size.h"

template <typename T, int Bits>
struct ElementOf {
  typedef uint type;
};
template <typename T>
struct ElementOf<T, 0> {
  typedef T type;
};

// One matrix in device memory. Scales and biases are those of packed weights.
template <typename T, int Bits>
struct Matrix {
  typedef typename ElementOf<T, Bits>::type Element;
  device const Element* data;
  device const uchar* scales;
  device const uchar* biases;
  int64_t stride, first_scale, first_bias, scales_stride, biases_stride;
  int scale_type, group_shift;
};

// That of one expert; expert 0 of a matrix without experts.
template <typename T, int Bits>
METAL_FUNC Matrix<T, Bits> matrix_of(
    device const typename ElementOf<T, Bits>::type* data,
    device const uchar* scales,
    device const uchar* biases,
    constant MatrixParameters& parameters,
    int expert) {
  Matrix<T, Bits> matrix;
  matrix.data = data + expert * parameters.expert_stride;
  matrix.scales = scales;
  matrix.biases = biases;
  matrix.stride = parameters.row_stride;
  matrix.first_scale = expert * parameters.scales_expert_stride;
  matrix.first_bias = expert * parameters.biases_expert_stride;
  matrix.scales_stride = parameters.scales_row_stride;
  matrix.biases_stride = parameters.biases_row_stride;
  matrix.scale_type = parameters.scale_type;
  matrix.group_shift = parameters.group_shift;
  return matrix;
}

// Consecutive rows of a matrix, packed. A lane loads kColumns at once and computes kStep weights of them at a time.
template <typename T, int Bits, int Width>
struct Weights {
  typedef float Staged;  // a weight rounded to 16 bits would cost as much as the rounding of a result
  GDN_CONSTANT int kColumns = 16;
  GDN_CONSTANT int kStep = 4;

  struct Block {
    Codes<Bits, kColumns> codes;
    ScaleAndRest own;
    METAL_FUNC Values<kStep> values(int step) const { return codes.values(step, own); }
  };

  // Where a slice of a vector has a column in threadgroup memory: what neighbouring lanes read at once lies side by
  // side.
  template <int Slice>
  METAL_FUNC static int place(int column) {
    return column % kColumns / kStep * (Slice * kStep / kColumns) + column / kColumns * kStep + column % kStep;
  }

  Matrix<T, Bits> matrix;
  int first, rows;  // that there are from the first on; a row past them repeats the last

  // A group has a multiple of 32 columns, so that a block lies in one.
  METAL_FUNC ScaleAndRest scale_at(int64_t row, int column) const {
    const int group = column >> matrix.group_shift;
    const float scale =
        read_float(matrix.scales, matrix.first_scale + row * matrix.scales_stride + group, matrix.scale_type);
    const float bias =
        read_float(matrix.biases, matrix.first_bias + row * matrix.biases_stride + group, matrix.scale_type);
    return scale_and_rest<Bits>(scale, bias);
  }

  METAL_FUNC Block load(int row, int column) const {
    const int64_t own = first + min(row, rows - 1);
    Block block;
    block.codes.template load<Width>(matrix.data + own * matrix.stride + column * Bits / 32);
    block.own = scale_at(own, column);
    return block;
  }

  // Computes columns of kTileColumns rows into a tile, and zeros past the last row. A thread owns 8 columns of a row.
  template <int Columns>
  METAL_FUNC void stage(threadgroup float* tile, int column, int columns, uint thread_index) const {
    static_assert(Columns == 32, "a group's columns are a multiple of a tile's");
    constexpr int kEights = Columns / 8;
    static_assert(kTileColumns * kEights == kTileThreads, "each thread has one item");
    const int row = int(thread_index) / kEights;
    const int at = int(thread_index) % kEights * 8;
    threadgroup float* target = tile + row * tile_stride<float>(Columns) + at;
    Codes<Bits, 8> codes;
    ScaleAndRest own;
    if (row < rows) {
      codes.template load<Width>(matrix.data + (first + row) * matrix.stride + (column + at) * Bits / 32);
      own = scale_at(first + row, column + at);
    }
    UNROLL for (int step = 0; step < 2; ++step) {
      float4 values = float4(0.0f);
      if (row < rows) {
        const Values<4> found = codes.values(step, own);
        values = float4(found.at[0], found.at[1], found.at[2], found.at[3]);
      }
      *(threadgroup float4*)(target + step * 4) = values;
    }
  }
};

// The same of numbers, which are read as they are.
template <typename T, int Width>
struct Weights<T, 0, Width> {
  typedef T Staged;
  GDN_CONSTANT int kColumns = Width;
  GDN_CONSTANT int kStep = Width;

  struct Block {
    Values<Width> loaded;
    METAL_FUNC Values<kStep> values(int) const { return loaded; }
  };

  template <int Slice>
  METAL_FUNC static int place(int column) {
    return column;
  }

  Matrix<T, 0> matrix;
  int first, rows;

  METAL_FUNC Block load(int row, int column) const {
    Block block;
    block.loaded = load_values<Width>(matrix.data + (first + min(row, rows - 1)) * matrix.stride + column);
    return block;
  }

  // Copies columns of kTileColumns rows into a tile, and zeros past the last row or column.
  template <int Columns>
  METAL_FUNC void stage(threadgroup T* tile, int column, int columns, uint thread_index) const {
    stage_rows<kTileColumns, Columns, Width, kTileThreads>(
        tile, matrix.data + first * matrix.stride + column, matrix.stride, rows, columns - column, thread_index);
  }
};

// Rows first .. rows of a matrix.
template <int Width, typename T, int Bits>
METAL_FUNC Weights<T, Bits, Width> rows_of(thread const Matrix<T, Bits>& matrix, int rows, int first) {
  Weights<T, Bits, Width> weights;
  weights.matrix = matrix;
  weights.first = first;
  weights.rows = rows - first;
  return weights;
}
