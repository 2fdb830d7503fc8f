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

// sums[(half * kRowsOfHalf + row) * Count + v] for the simdgroup's own rows: complete in every lane. `Count` vectors
// are multiplied, of which those past group.count are not there.
template <int Count, int Most, int Width, int Threads, typename T, typename Decoder>
METAL_FUNC void multiply_vectors(
    thread float* sums,
    threadgroup T* staged,
    thread const Decoder& first,
    thread const Decoder& second,
    thread const VectorRows<T>& vectors,
    thread const PairGroup<Most>& group,
    int columns,
    uint thread_index,
    uint lane) {
  constexpr int kColumns = staged_columns<T, Most>();
  constexpr int kStep = Decoder::kStep;
  static_assert(kColumns % Decoder::kColumns == 0, "a slice holds whole blocks");
  UNROLL for (int i = 0; i < 2 * kRowsOfHalf * Count; ++i) sums[i] = 0.0f;
  for (int slice = 0; slice < columns; slice += kColumns) {
    const int length = min(kColumns, columns - slice);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int v = 0; v < Count; ++v) {
      device const T* source = vectors.of_pair(group.pairs[v]) + slice;
      for (int column = int(thread_index) * Width; column < length; column += Threads * Width) {
        typedef typename VectorOf<T, Width>::type Vector;
        const Vector values = v < group.count ? Vector(*(device const Vector*)(source + column)) : Vector(T(0));
        *(threadgroup Vector*)(staged + v * kColumns + Decoder::template place<kColumns>(column)) = values;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int column = int(lane) * Decoder::kColumns; column < length; column += 32 * Decoder::kColumns) {
      typename Decoder::Block blocks[2 * kRowsOfHalf];
      UNROLL for (int row = 0; row < kRowsOfHalf; ++row) {
        blocks[row] = first.load(row, slice + column);
        blocks[kRowsOfHalf + row] = second.load(row, slice + column);
      }
      UNROLL for (int step = 0; step < Decoder::kColumns / kStep; ++step) {
        Values<kStep> weights[2 * kRowsOfHalf];
        UNROLL for (int row = 0; row < 2 * kRowsOfHalf; ++row) weights[row] = blocks[row].values(step);
        UNROLL for (int v = 0; v < Count; ++v) {
          const int at = v * kColumns + Decoder::template place<kColumns>(column + step * kStep);
          const Values<kStep> x = staged_values<kStep>(staged + at);
          UNROLL for (int row = 0; row < 2 * kRowsOfHalf; ++row) {
            UNROLL for (int i = 0; i < kStep; ++i) sums[row * Count + v] += weights[row].at[i] * x.at[i];
          }
        }
      }
    }
  }
  UNROLL for (int i = 0; i < 2 * kRowsOfHalf * Count; ++i) sums[i] = simd_sum(sums[i]);
}
