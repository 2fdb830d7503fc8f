// Multiplies a threadgroup's rows of two matrices by up to `Most` vectors. The vectors are staged in threadgroup
// memory, a slice of their columns at a time. Each weight is read and decoded once, and meets all vectors in registers.
#pragma once
#include "experts/few_rows.h"
#include "experts/pairs.h"
#include "experts/weights.h"

GDN_CONSTANT int kStagedBytes = 16384;  // 1,024 columns of 8 vectors of 16 bits: a block for each lane

template <typename T, int Most>
METAL_FUNC constexpr int staged_columns() {
  return kStagedBytes / Most / int(sizeof(T));
}

// The vectors to multiply.
template <typename T>
struct VectorRows {
  device const T* data;
  int64_t stride;
  int divisor;  // of a pair's number: k if each row belongs to a token, else 1

  METAL_FUNC device const T* of_pair(int pair) const { return data + int64_t(pair / divisor) * stride; }
};

template <int Width, typename T>
METAL_FUNC Values<Width> staged_values(threadgroup const T* source) {
  typedef typename VectorOf<T, Width>::type Vector;
  const Vector loaded = *(threadgroup const Vector*)source;
  Values<Width> values;
  if constexpr (Width == 1) {
    values.at[0] = float(loaded);
  } else {
    UNROLL for (int i = 0; i < Width; ++i) values.at[i] = float(loaded[i]);
  }
  return values;
}

// Decodes Step columns of Rows rows and adds their products. `staged` has those columns of the first vector.
template <int Count, int Rows, int Step, typename T, int Bits, int Width>
METAL_FUNC void multiply_values(
    thread float* sums,
    thread const WeightBlock<Bits, Width>* blocks,
    int step,
    threadgroup const T* staged,
    int columns) {
  Values<Step> weights[Rows];
  UNROLL for (int row = 0; row < Rows; ++row) weights[row] = blocks[row].values(step);
  UNROLL for (int v = 0; v < Count; ++v) {
    const Values<Step> x = staged_values<Step>(staged + v * columns);
    UNROLL for (int row = 0; row < Rows; ++row) {
      UNROLL for (int i = 0; i < Step; ++i) sums[row * Count + v] += weights[row].at[i] * x.at[i];
    }
  }
}

// The rows that a simdgroup multiplies: Half consecutive rows of each of the two matrices.
template <int Half, typename T, int Bits, int Width>
struct TwoMatrices {
  typedef Weights<T, Bits, Width> Matrix;
  Matrix first, second;

  // Both matrices share S and B, which Weights::load_scale explains.
  template <typename S, typename B>
  METAL_FUNC void load_scales(thread WeightBlock<Bits, Width>* blocks, int column) const {
    UNROLL for (int row = 0; row < Half; ++row) {
      first.template load_scale<S, B>(blocks[row], row, column);
      second.template load_scale<S, B>(blocks[Half + row], row, column);
    }
  }

  METAL_FUNC void load(thread WeightBlock<Bits, Width>* blocks, int column) const {
    UNROLL for (int row = 0; row < Half; ++row) {
      first.load(blocks[row], row, column);
      second.load(blocks[Half + row], row, column);
    }
    if constexpr (Bits != 0) {
      // All rows share one branch: a load behind its own branch waits for the load before it.
      if (first.scale_type == kFloat32) {
        load_scales<float, float>(blocks, column);
      } else if (first.has_zero_points) {
        load_scales<ushort, uchar>(blocks, column);
      } else {
        load_scales<ushort, ushort>(blocks, column);
      }
    }
  }
};

// Copies a slice of the vectors to threadgroup memory, in the order in which lanes read it. A vector past group.count
// is zeros.
template <int Count, int Slice, int Threads, typename Matrix, int Width, typename T, int Most>
METAL_FUNC void stage_vectors(
    threadgroup T* staged,
    thread const VectorRows<T>& vectors,
    thread const PairGroup<Most>& group,
    int slice,
    int length,
    uint thread_index) {
  typedef typename VectorOf<T, Width>::type Vector;
  UNROLL for (int v = 0; v < Count; ++v) {
    device const T* source = vectors.of_pair(group.pairs[v]) + slice;
    for (int column = int(thread_index) * Width; column < length; column += Threads * Width) {
      const Vector values = v < group.count ? Vector(*(device const Vector*)(source + column)) : Vector(T(0));
      *(threadgroup Vector*)(staged + v * Slice + Matrix::template place<Slice>(column)) = values;
    }
  }
}

// Computes sums[row * Count + v] for the rows of `weights`: each lane's share, which reduce_to_lanes adds up. It
// multiplies `Count` vectors; the sums of those past group.count are not used. Part p of the simdgroups that share
// these rows takes every Parts-th block of 32 lanes' columns. The first block of a slice is loaded while the vectors
// are copied.
template <int Count, int Most, int Threads, int Parts, int Half, typename T, int Bits, int Width>
METAL_FUNC void multiply_vectors(
    thread float* sums,
    threadgroup T* staged,
    thread const TwoMatrices<Half, T, Bits, Width>& weights,
    thread const VectorRows<T>& vectors,
    thread const PairGroup<Most>& group,
    int columns,
    int part,
    uint thread_index,
    uint lane) {
  typedef Weights<T, Bits, Width> Matrix;
  constexpr int kSlice = staged_columns<T, Most>();
  constexpr int kStep = 32 * Parts * Matrix::kColumns;
  constexpr int kValues = WeightBlock<Bits, Width>::kValues;
  static_assert(kSlice % Matrix::kColumns == 0, "a slice holds whole blocks");
  UNROLL for (int i = 0; i < 2 * Half * Count; ++i) sums[i] = 0.0f;
  const int first = (part * 32 + int(lane)) * Matrix::kColumns;
  for (int slice = 0; slice < columns; slice += kSlice) {
    const int length = min(kSlice, columns - slice);
    WeightBlock<Bits, Width> blocks[2 * Half];
    if (first < length) weights.load(blocks, slice + first);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_vectors<Count, kSlice, Threads, Matrix, Width>(staged, vectors, group, slice, length, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int column = first; column < length; column += kStep) {
      UNROLL for (int step = 0; step < Matrix::kColumns / kValues; ++step) {
        threadgroup const T* x = staged + Matrix::template place<kSlice>(column + step * kValues);
        multiply_values<Count, 2 * Half, kValues>(sums, blocks, step, x, kSlice);
      }
      if (column + kStep < length) weights.load(blocks, slice + column + kStep);
    }
  }
}

// One round of reduce_to_lanes. A lane has 2 Size values. It keeps the half that its bit Size selects, and passes the
// other half to the lane that keeps it.
template <int Size>
METAL_FUNC void halve_values(thread float* values, uint lane) {
  if constexpr (Size > 0) {
    const bool keeps_upper = (lane & uint(Size)) != 0;
    UNROLL for (int i = 0; i < Size; ++i) {
      const float kept = keeps_upper ? values[Size + i] : values[i];
      const float handed = keeps_upper ? values[i] : values[Size + i];
      values[i] = kept + simd_shuffle_xor(handed, ushort(Size));
    }
    halve_values<Size / 2>(values, lane);
  }
}

// Adds up values[i] over all lanes, for each i. Lane l returns the sum of values[l % Count]. Destroys `values`. For 32
// values it takes 31 shuffles, while a simd_sum per value would take 160.
template <int Count>
METAL_FUNC float reduce_to_lanes(thread float* values, uint lane) {
  static_assert(Count <= 32 && (Count & (Count - 1)) == 0, "each value has a lane");
  halve_values<Count / 2>(values, lane);
  float sum = values[0];
  UNROLL for (int distance = Count; distance < 32; distance *= 2) sum += simd_shuffle_xor(sum, ushort(distance));
  return sum;
}
