// Tiles: rows of a matrix, staged in threadgroup memory so that a threadgroup reads them from the device once.
#pragma once
#include <metal_stdlib>
using namespace metal;

// `Width` neighbouring elements that are loaded at once. The host picks 4 where every offset and stride allows it.
template <typename T, int Width>
struct Packet {
  static_assert(Width == 2 || Width == 4, "a packet holds 1, 2 or 4 elements");
  typedef vec<T, Width> type;
};
template <typename T>
struct Packet<T, 1> {
  typedef T type;
};

// The row stride of a tile. 16 bytes of padding move neighbouring rows 4 of the 32 banks apart, so that the 8 rows of a
// fragment fall on different banks.
template <typename T>
METAL_FUNC constexpr int tile_stride(int columns) {
  return columns + 16 / int(sizeof(T));
}

// Fills a Rows x Columns tile from device rows. What lies beyond `rows` and `columns` becomes zero, so that products
// over the tile need no masks.
template <int Rows, int Columns, int Width, int Threads, typename T>
METAL_FUNC void stage_rows(
    threadgroup T* tile, device const T* source, int64_t row_stride, int rows, int columns, uint thread_index) {
  static_assert(Columns % Width == 0, "a tile's row must hold whole packets");
  typedef typename Packet<T, Width>::type Values;
  constexpr int kStride = tile_stride<T>(Columns);
  constexpr int kPackets = Columns / Width;
  for (int packet = int(thread_index); packet < Rows * kPackets; packet += Threads) {
    const int row = packet / kPackets;
    const int column = packet % kPackets * Width;
    const bool is_there = row < rows && column < columns;
    const Values values = is_there ? Values(*(device const Values*)(source + row * row_stride + column)) : Values(T(0));
    *(threadgroup Values*)(tile + row * kStride + column) = values;
  }
}

// The way back: of a tile, what lies within `rows` and `columns`.
template <int Rows, int Columns, int Width, int Threads, typename T>
METAL_FUNC void write_rows(
    device T* target, threadgroup const T* tile, int64_t row_stride, int rows, int columns, uint thread_index) {
  static_assert(Columns % Width == 0, "a tile's row must hold whole packets");
  typedef typename Packet<T, Width>::type Values;
  constexpr int kStride = tile_stride<T>(Columns);
  constexpr int kPackets = Columns / Width;
  for (int packet = int(thread_index); packet < Rows * kPackets; packet += Threads) {
    const int row = packet / kPackets;
    const int column = packet % kPackets * Width;
    if (row < rows && column < columns) {
      const Values values = *(threadgroup const Values*)(tile + row * kStride + column);
      *(device Values*)(target + row * row_stride + column) = values;
    }
  }
}
