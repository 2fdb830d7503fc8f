// Products of a threadgroup's rows of two matrices with up to `Most` vectors. The vectors are staged in threadgroup
// memory, a slice of their columns at a time; each weight is read once and meets all of them in registers.
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

// sums[(half * kRowsOfHalf + row) * Count + v] for the simdgroup's own rows: complete in every lane. `Count` vectors
// are multiplied, of which those past group.count are not there.
template <int Count, int Most, int Width, int Threads, typename T, typename Weights>
METAL_FUNC void multiply_vectors(
    thread float* sums,
    threadgroup T* staged,
    thread const Weights& first,
    thread const Weights& second,
    thread const VectorRows<T>& vectors,
    thread const PairGroup<Most>& group,
    int columns,
    uint thread_index,
    uint lane) {
  constexpr int kColumns = staged_columns<T, Most>();
  UNROLL for (int i = 0; i < 2 * kRowsOfHalf * Count; ++i) sums[i] = 0.0f;
  for (int slice = 0; slice < columns; slice += kColumns) {
    const int length = min(kColumns, columns - slice);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int v = 0; v < Count; ++v) {
      device const T* source = vectors.of_pair(group.pairs[v]) + slice;
      for (int column = int(thread_index) * Width; column < length; column += Threads * Width) {
        typedef typename VectorOf<T, Width>::type Vector;
        const Vector values = v < group.count ? Vector(*(device const Vector*)(source + column)) : Vector(T(0));
        *(threadgroup Vector*)(staged + v * kColumns + column) = values;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int column = int(lane) * Width; column < length; column += 32 * Width) {
      Values<Width> weights[2 * kRowsOfHalf];
      UNROLL for (int row = 0; row < kRowsOfHalf; ++row) {
        weights[row] = first.load(row, slice + column);
        weights[kRowsOfHalf + row] = second.load(row, slice + column);
      }
      UNROLL for (int v = 0; v < Count; ++v) {
        typedef typename VectorOf<T, Width>::type Vector;
        const Vector loaded = *(threadgroup const Vector*)(staged + v * kColumns + column);
        Values<Width> x;
        if constexpr (Width == 1) {
          x.at[0] = float(loaded);
        } else {
          UNROLL for (int i = 0; i < Width; ++i) x.at[i] = float(loaded[i]);
        }
        UNROLL for (int row = 0; row < 2 * kRowsOfHalf; ++row) {
          UNROLL for (int i = 0; i < Width; ++i) sums[row * Count + v] += weights[row].at[i] * x.at[i];
        }
      }
    }
  }
  UNROLL for (int i = 0; i < 2 * kRowsOfHalf * Count; ++i) sums[i] = simd_sum(sums[i]);
}
