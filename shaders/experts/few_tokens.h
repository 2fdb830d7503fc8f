// Products of a threadgroup's rows of two matrices with up to `Most` vectors. The vectors are staged in threadgroup
// memory, a slice of their columns at a time; each weight is read and decoded once and meets all of them in registers.
#pragma once
#include "experts/few_rows.h"
#include "experts/pairs.h"
#include "experts/weights.h"

GDN_CONSTANT int kStagedBytes = 8192;

template <typename T, int Most>
METAL_FUNC constexpr int staged_columns() {
  return kStagedBytes / Most / int(sizeof(T));
}

// The rows of vectors that are multiplied.
template <typename T>
struct VectorRows {
  device const T* data;
  int64_t stride;
  int divisor;  // of a pair's number: k where the rows are those of tokens, else 1

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

// Adds the products of Step columns of Rows rows. `staged` has those columns of the first vector.
template <int Count, int Rows, int Step, typename T>
METAL_FUNC void multiply_values(
    thread float* sums, thread const Values<Step>* weights, threadgroup const T* staged, int columns) {
  UNROLL for (int v = 0; v < Count; ++v) {
    const Values<Step> x = staged_values<Step>(staged + v * columns);
    UNROLL for (int row = 0; row < Rows; ++row) {
      UNROLL for (int i = 0; i < Step; ++i) sums[row * Count + v] += weights[row].at[i] * x.at[i];
    }
  }
}

// Loads the scales of rows base .. base + Rows - 1 as numbers of S. A checkpoint's two matrices have one dtype of
// scales.
template <typename S, int Rows, typename T, int Bits, int Width>
METAL_FUNC void load_scales(
    thread WeightBlock<Bits>* blocks,
    thread const Weights<T, Bits, Width>& first,
    thread const Weights<T, Bits, Width>& second,
    int base,
    int column) {
  UNROLL for (int row = 0; row < Rows; ++row) {
    if (base + row < kRowsOfHalf) {
      first.template load_scale<S>(blocks[row], base + row, column);
    } else {
      second.template load_scale<S>(blocks[row], base + row - kRowsOfHalf, column);
    }
  }
}

// Does the same for packed rows, and decodes 4 columns at a time. For one vector, registers have room for 8 decoded
// rows next to the sums; for several vectors it decodes 2 rows at a time.
template <int Count, int Slice, typename T, int Bits, int Width>
METAL_FUNC void multiply_blocks(
    thread float* sums,
    thread const Weights<T, Bits, Width>& first,
    thread const Weights<T, Bits, Width>& second,
    threadgroup const T* staged,
    int slice,
    int column) {
  constexpr int kRows = Count == 1 ? 2 * kRowsOfHalf : kRowsOfHalf / 2;
  UNROLL for (int base = 0; base < 2 * kRowsOfHalf; base += kRows) {
    WeightBlock<Bits> blocks[kRows];
    UNROLL for (int row = 0; row < kRows; ++row) {
      if (base + row < kRowsOfHalf) {
        first.load_codes(blocks[row], base + row, slice + column);
      } else {
        second.load_codes(blocks[row], base + row - kRowsOfHalf, slice + column);
      }
    }
    // One branch for all rows: a load behind a branch of its own waits for the load before it.
    if (first.scale_type == kFloat32) {
      load_scales<float, kRows>(blocks, first, second, base, slice + column);
    } else {
      load_scales<T, kRows>(blocks, first, second, base, slice + column);
    }
    UNROLL for (int step = 0; step < first.kColumns / 4; ++step) {
      Values<4> weights[kRows];
      UNROLL for (int row = 0; row < kRows; ++row) weights[row] = blocks[row].values(step);
      threadgroup const T* x = staged + first.template place<Slice>(column + step * 4);
      multiply_values<Count, kRows, 4>(sums + base * Count, weights, x, Slice);
    }
  }
}

// sums[(half * kRowsOfHalf + row) * Count + v] for the simdgroup's own rows: complete in every lane. `Count` vectors
// are multiplied, of which those past group.count are not there.
template <int Count, int Most, int Threads, typename T, int Bits, int Width>
METAL_FUNC void multiply_vectors(
    thread float* sums,
    threadgroup T* staged,
    thread const Weights<T, Bits, Width>& first,
    thread const Weights<T, Bits, Width>& second,
    thread const VectorRows<T>& vectors,
    thread const PairGroup<Most>& group,
    int columns,
    uint thread_index,
    uint lane) {
  constexpr int kColumns = staged_columns<T, Most>();
  constexpr int kBlock = Weights<T, Bits, Width>::kColumns;
  static_assert(kColumns % kBlock == 0, "a slice holds whole blocks");
  UNROLL for (int i = 0; i < 2 * kRowsOfHalf * Count; ++i) sums[i] = 0.0f;
  for (int slice = 0; slice < columns; slice += kColumns) {
    const int length = min(kColumns, columns - slice);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int v = 0; v < Count; ++v) {
      device const T* source = vectors.of_pair(group.pairs[v]) + slice;
      for (int column = int(thread_index) * Width; column < length; column += Threads * Width) {
        typedef typename VectorOf<T, Width>::type Vector;
        const Vector values = v < group.count ? Vector(*(device const Vector*)(source + column)) : Vector(T(0));
        *(threadgroup Vector*)(staged + v * kColumns + first.template place<kColumns>(column)) = values;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int column = int(lane) * kBlock; column < length; column += 32 * kBlock) {
      if constexpr (Bits == 0) {
        Values<Width> weights[2 * kRowsOfHalf];
        UNROLL for (int row = 0; row < kRowsOfHalf; ++row) {
          weights[row] = first.load(row, slice + column);
          weights[kRowsOfHalf + row] = second.load(row, slice + column);
        }
        multiply_values<Count, 2 * kRowsOfHalf, Width>(sums, weights, staged + column, kColumns);
      } else {
        multiply_blocks<Count, kColumns>(sums, first, second, staged, slice, column);
      }
    }
  }
  UNROLL for (int i = 0; i < 2 * kRowsOfHalf * Count; ++i) sums[i] = simd_sum(sums[i]);
}
