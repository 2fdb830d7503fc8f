// Reads the weights of a matrix. A kernel has Bits as a template argument: 0 for numbers of type T, 4 or 8 for packed
// codes, kE4M3 for numbers of 8 bits, kE2M1 for numbers of 4 bits. It reads all through Weights.
#pragma once
#include "core/packed.h"
#include "core/parameters.h"
#include "core/tile.h"
#include "experts/parameters.h"

// One matrix of weights, or one per expert.
struct Matrix {
  device const uchar* weights;
  device const uchar* scales;
  device const uchar* biases;
  constant MatrixParameters* parameters;
};

template <int Width, typename T>
METAL_FUNC void split(thread T* result, typename VectorOf<T, Width>::type vector) {
  if constexpr (Width == 1) {
    result[0] = vector;
  } else {
    UNROLL for (int i = 0; i < Width; ++i) result[i] = vector[i];
  }
}

template <int Width, typename T>
METAL_FUNC typename VectorOf<T, Width>::type joined(thread const T* numbers) {
  if constexpr (Width == 1) {
    return numbers[0];
  } else {
    return vec<T, 4>(numbers[0], numbers[1], numbers[2], numbers[3]);
  }
}

// A lane loads 16 bytes of codes at once. They belong to one row and to one group. A step takes kValues columns, in the
// order of pairs. A word has kSteps steps. A product with a vector x is scale * (sum of numbers * x) + rest * (sum of
// x).
template <int Bits, int Width>
struct WeightBlock {
  GDN_CONSTANT int kValues = 4;
  GDN_CONSTANT int kSteps = 8 / bits_of_code<Bits>();
  GDN_CONSTANT int kColumns = 128 / bits_of_code<Bits>();
  Codes<Bits, kColumns> codes;
  ScaleAndRest<Bits> own;

  METAL_FUNC Values<4> numbers(int step) const { return codes.numbers(step); }
  METAL_FUNC Values<4> values(int step) const {
    Values<4> result = numbers(step);
    UNROLL for (int i = 0; i < 4; ++i) result.at[i] = own.weight(result.at[i]);
    return result;
  }
  METAL_FUNC float product(float unscaled, float total) const { return own.product(unscaled, total); }

  // Loads the elements of a vector that are multiplied by the steps of a word. The vector ends after `left` elements.
  template <typename T>
  METAL_FUNC static void load_vector(thread T* result, device const T* source, int word, int left) {
    load_for_word<Bits, Width>(result, source, word, left);
  }
};

// Does the same for weights that are numbers.
template <int Width>
struct WeightBlock<0, Width> {
  GDN_CONSTANT int kValues = Width;
  GDN_CONSTANT int kSteps = 1;
  GDN_CONSTANT int kColumns = Width;
  Values<Width> all;

  METAL_FUNC Values<Width> numbers(int) const { return all; }
  METAL_FUNC Values<Width> values(int) const { return all; }
  METAL_FUNC float product(float unscaled, float) const { return unscaled; }

  template <typename T>
  METAL_FUNC static void load_vector(thread T* result, device const T* source, int, int) {
    split<Width>(result, *(device const typename VectorOf<T, Width>::type*)source);
  }
};

// The bytes that kTileColumns rows of kTileDepth columns take in threadgroup memory. Decoded weights are f32, because
// rounding them to 16 bits would add as much error as rounding the result does.
template <typename T, int Bits>
METAL_FUNC constexpr int staged_bytes() {
  return kTileColumns * (Bits == 0 ? tile_stride<T>(kTileDepth) * int(sizeof(T)) : tile_stride<float>(kTileDepth) * 4);
}

// How packed weights lie in memory: codes in words, or numbers in bytes.
template <int Bits>
struct StoredAs {
  typedef uint type;
  GDN_CONSTANT int kColumns = 32 / bits_of_code<Bits>();
};

template <>
struct StoredAs<kE4M3> {
  typedef uchar type;
  GDN_CONSTANT int kColumns = 1;
};

// Consecutive rows of a packed matrix.
template <typename T, int Bits, int Width, typename Stored = typename StoredAs<Bits>::type>
struct Weights {
  GDN_CONSTANT int kColumns = WeightBlock<Bits, Width>::kColumns;  // per load of a lane

  device const Stored* data;
  device const uchar* scales;  // of e4m3 numbers, of the matrix's first row
  device const uchar* biases;
  int stride, scales_stride, biases_stride;  // 32-bit products are cheap; the host checks that they fit
  int scale_type, group_shift;
  int first_row, row_shift, columns;  // of e4m3 numbers, whose rows share scales and end at any column
  bool has_zero_points;
  int rows;  // rows past these repeat the last row

  METAL_FUNC void locate(Matrix matrix, int expert, int64_t first) {
    constant MatrixParameters& parameters = *matrix.parameters;
    data = (device const Stored*)matrix.weights + expert * parameters.expert_stride + first * parameters.row_stride;
    scale_type = parameters.scale_type;
    has_zero_points = parameters.has_zero_points != 0;
    const int bytes = Bits == kE2M1 ? 1 : scale_type == kFloat32 ? 4 : 2;
    const int bias_bytes = has_zero_points ? 1 : bytes;
    const int64_t first_scales = Bits == kE4M3 ? 0 : first;
    scales = matrix.scales +
             (expert * parameters.scales_expert_stride + first_scales * parameters.scales_row_stride) * bytes;
    biases =
        matrix.biases + (expert * parameters.biases_expert_stride + first * parameters.biases_row_stride) * bias_bytes;
    stride = int(parameters.row_stride);
    scales_stride = int(parameters.scales_row_stride);
    biases_stride = int(parameters.biases_row_stride);
    group_shift = parameters.group_shift;
    first_row = int(first);
    row_shift = parameters.row_shift;
    columns = parameters.columns;
  }

  // A group has a multiple of 32 columns, so a block lies within one group.
  METAL_FUNC int group_of(int column) const { return column >> group_shift; }

  METAL_FUNC int64_t scale_index(int row, int column) const {
    const int64_t scale_row = Bits == kE4M3 ? (first_row + row) >> row_shift : row;
    return scale_row * scales_stride + group_of(column);
  }

  METAL_FUNC ScaleAndRest<Bits> scale_at(int row, int column) const {
    ScaleAndRest<Bits> result;
    if constexpr (Bits == kE2M1) {
      result.scale = decode_e8m0(scales[scale_index(row, column)]);
    } else {
      const float scale = read_float(scales, scale_index(row, column), scale_type);
      if constexpr (Bits == kE4M3) {
        result.scale = scale;
      } else {
        const int64_t at = int64_t(row) * biases_stride + group_of(column);
        if (has_zero_points) {
          result.set(scale, biases[at]);
        } else {
          result.set(scale, read_float(biases, at, scale_type));
        }
      }
    }
    return result;
  }

  // LoadWidth is 1 if the rows of a matrix may start anywhere.
  template <int LoadWidth, int Columns>
  METAL_FUNC void load_codes(thread Codes<Bits, Columns>& codes, int row, int column) const {
    device const Stored* source = data + int64_t(row) * stride + column / StoredAs<Bits>::kColumns;
    if constexpr (Bits == kE4M3) {
      codes.template load<LoadWidth>(source, columns - column);
    } else {
      codes.template load<LoadWidth>(source);
    }
  }

  METAL_FUNC void load(thread WeightBlock<Bits, Width>& block, int row, int column) const {
    load_codes<Width>(block.codes, min(row, rows - 1), column);
  }

  METAL_FUNC float number_of(float stored) const { return stored; }
  METAL_FUNC float number_of(ushort stored) const { return float_of_16_bits(stored, scale_type); }
  METAL_FUNC uchar number_of(uchar zero_point) const { return zero_point; }

  // S is float, ushort for 16-bit scales, or uchar for e8m0. B is S, or uchar for zero points.
  template <typename S, typename B>
  METAL_FUNC void load_scale(thread WeightBlock<Bits, Width>& block, int row, int column) const {
    const int own = min(row, rows - 1);
    const S scale = ((device const S*)scales)[scale_index(own, column)];
    if constexpr (Bits == kE2M1) {
      block.own.scale = decode_e8m0(scale);
    } else if constexpr (Bits == kE4M3) {
      block.own.scale = number_of(scale);
    } else {
      const B bias = ((device const B*)biases)[int64_t(own) * biases_stride + group_of(column)];
      block.own.set(number_of(scale), number_of(bias));
    }
  }

  // Decodes kTileDepth columns of kTileColumns rows into a tile, with zeros past the last row or column. A thread owns
  // 8 columns of a row.
  METAL_FUNC void stage(threadgroup uchar* tile, int column, int, uint thread_index) const {
    static_assert(kTileDepth == 32, "a group's columns are a multiple of a tile's");
    constexpr int kEights = kTileDepth / 8;
    static_assert(kTileColumns * kEights == kTileThreads, "each thread has one item");
    const int row = int(thread_index) / kEights;
    const int at = int(thread_index) % kEights * 8;
    threadgroup float* target = (threadgroup float*)tile + row * tile_stride<float>(kTileDepth) + at;
    if (row >= rows || (Bits == kE4M3 && column + at >= columns)) {
      UNROLL for (int step = 0; step < 2; ++step) { *(threadgroup float4*)(target + step * 4) = float4(0.0f); }
      return;
    }
    Codes<Bits, 8> codes;
    load_codes<Width>(codes, row, column + at);
    const ScaleAndRest<Bits> own = scale_at(row, column + at);
    UNROLL for (int step = 0; step < 2; ++step) {
      const Values<4> result = codes.weights(step, own);
      *(threadgroup float4*)(target + step * 4) = float4(result.at[0], result.at[1], result.at[2], result.at[3]);
    }
  }

  // Loads columns depth .. depth + 7 of a tile's rows row .. row + 7, transposed.
  METAL_FUNC static float2 load_weights(threadgroup const uchar* tile, int row, int depth, LanePosition at) {
    constexpr int kStride = tile_stride<float>(kTileDepth);
    return load_transposed((threadgroup const float*)tile + row * kStride + depth, kStride, at);
  }
};

// Does the same for weights that are numbers. They are read as they are.
template <typename T, int Width>
struct Weights<T, 0, Width> {
  GDN_CONSTANT int kColumns = Width;

  device const T* data;
  int stride;
  int rows;

  METAL_FUNC void locate(Matrix matrix, int expert, int64_t first) {
    constant MatrixParameters& parameters = *matrix.parameters;
    data = (device const T*)matrix.weights + expert * parameters.expert_stride + first * parameters.row_stride;
    stride = int(parameters.row_stride);
  }

  METAL_FUNC void load(thread WeightBlock<0, Width>& block, int row, int column) const {
    block.all = load_values<Width>(data + int64_t(min(row, rows - 1)) * stride + column);
  }

  // Copies kTileDepth columns of kTileColumns rows into a tile, with zeros past the last row or column.
  METAL_FUNC void stage(threadgroup uchar* tile, int column, int columns, uint thread_index) const {
    stage_rows<kTileColumns, kTileDepth, Width, kTileThreads>(
        (threadgroup T*)tile, data + column, stride, rows, columns - column, thread_index);
  }

  METAL_FUNC static float2 load_weights(threadgroup const uchar* tile, int row, int depth, LanePosition at) {
    constexpr int kStride = tile_stride<T>(kTileDepth);
    return load_transposed((threadgroup const T*)tile + row * kStride + depth, kStride, at);
  }
};

// Returns `rows` rows of one expert's matrix, from `first` on. For a matrix without experts, pass expert 0.
template <typename T, int Bits, int Width>
METAL_FUNC Weights<T, Bits, Width> rows_of(Matrix matrix, int expert, int64_t first, int rows) {
  Weights<T, Bits, Width> own;
  own.locate(matrix, expert, first);
  own.rows = rows;
  return own;
}
