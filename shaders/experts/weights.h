// How the weights of a matrix are read. A kernel takes the type as a template argument: packed weights of fewer bits
// need another type with the same members, and nothing else.
#pragma once
#include "core/tile.h"
#include "experts/tile_size.h"

// Consecutive rows of a matrix of T, which are read as they are.
template <typename T, int Width>
struct DenseWeights {
  device const T* data;
  int64_t stride;
  int rows;  // that there are; a row past them repeats the last

  METAL_FUNC Values<Width> load(int row, int column) const {
    return load_values<Width>(data + min(row, rows - 1) * stride + column);
  }

  // Copies columns of kTileColumns rows into a tile, and zeros past the last row or column.
  template <int Columns>
  METAL_FUNC void stage(threadgroup T* tile, int column, int columns, uint thread_index) const {
    stage_rows<kTileColumns, Columns, Width, kTileThreads>(
        tile, data + column, stride, rows, columns - column, thread_index);
  }
};

// Rows first .. rows of a matrix.
template <int Width, typename T>
METAL_FUNC DenseWeights<T, Width> dense_weights(device const T* data, int64_t stride, int rows, int first) {
  DenseWeights<T, Width> weights;
  weights.data = data + first * stride;
  weights.stride = stride;
  weights.rows = rows - first;
  return weights;
}
