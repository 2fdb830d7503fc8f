// A tile holds rows of a matrix in threadgroup memory; a threadgroup reads it once from device memory. Items are
// divided as unsigned numbers, because a signed division by a power of two takes four more instructions.
#pragma once
#include "core/vectors.h"

// Each row has 16 bytes of padding, which put neighbouring rows 4 of the 32 banks apart. The 8 rows of a fragment then
// hit different banks.
template <typename T>
METAL_FUNC constexpr int tile_stride(int columns) {
  return columns + 16 / int(sizeof(T));
}

// Maps the threads of row `row` to a row of the tile. With 64 bytes per row, neighbouring rows would share banks; rows
// 4 apart do not.
template <int Rows, int Columns, typename T>
METAL_FUNC int staged_row(uint row) {
  if (Columns * int(sizeof(T)) != 64 || Rows % 8 != 0) return int(row);
  return int(row / 8 * 8 + row % 2 * 4 + row / 2 % 4);
}

// Fills the tile with zeros beyond `rows` and `columns`, so that products with it need no masks.
template <int Rows, int Columns, int Width, int Threads, typename T>
METAL_FUNC void stage_rows(
    threadgroup T* tile, device const T* source, int64_t row_stride, int rows, int columns, uint thread_index) {
  static_assert(Columns % Width == 0, "a tile's row must hold whole vectors");
  typedef typename VectorOf<T, Width>::type Vector;
  constexpr int kStride = tile_stride<T>(Columns);
  constexpr int kVectors = Columns / Width;
  for (uint item = thread_index; item < uint(Rows * kVectors); item += Threads) {
    const int row = staged_row<Rows, Columns, T>(item / uint(kVectors));
    const int column = int(item % uint(kVectors)) * Width;
    const bool is_there = row < rows && column < columns;
    const Vector values = is_there ? Vector(*(device const Vector*)(source + row * row_stride + column)) : Vector(T(0));
    *(threadgroup Vector*)(tile + row * kStride + column) = values;
  }
}

template <int Rows, int Columns, int Width, int Threads, typename T>
METAL_FUNC void write_rows(
    device T* target, threadgroup const T* tile, int64_t row_stride, int rows, int columns, uint thread_index) {
  static_assert(Columns % Width == 0, "a tile's row must hold whole vectors");
  typedef typename VectorOf<T, Width>::type Vector;
  constexpr int kStride = tile_stride<T>(Columns);
  constexpr int kVectors = Columns / Width;
  for (uint item = thread_index; item < uint(Rows * kVectors); item += Threads) {
    const int row = staged_row<Rows, Columns, T>(item / uint(kVectors));
    const int column = int(item % uint(kVectors)) * Width;
    if (row < rows && column < columns) {
      const Vector values = *(threadgroup const Vector*)(tile + row * kStride + column);
      *(device Vector*)(target + row * row_stride + column) = values;
    }
  }
}
