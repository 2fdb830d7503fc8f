// Multiplies a threadgroup's rows of two matrices by up to `Most` vectors. The vectors are staged in threadgroup
// memory, one slice of columns at a time. Each weight is read and decoded once, and is multiplied by all vectors in
// registers.
#pragma once
#include "experts/pairs.h"
#include "experts/weights.h"

GDN_CONSTANT int kStagedBytes = 16384;  // 1,024 columns of 8 vectors of 16 bits: one block per lane

template <typename T, int Most>
METAL_FUNC constexpr int staged_columns() {
  return kStagedBytes / Most / int(sizeof(T));
}

// A vector in threadgroup memory, from a lane's first column on. The elements of a step are adjacent.
template <typename Block, int Distance, typename T>
struct StagedVector {
  threadgroup const T* columns;
  METAL_FUNC void load_step(thread T* result, int step) const {
    split<Block::kValues>(
        result, *(threadgroup const typename VectorOf<T, Block::kValues>::type*)(columns + step * Distance));
  }
  METAL_FUNC void load(thread T* result, int word) const {
    UNROLL for (int i = 0; i < Block::kSteps; ++i) load_step(result + i * Block::kValues, word * Block::kSteps + i);
  }
};

// A vector in device memory, from a lane's first column on.
template <typename Block, typename T>
struct StoredVector {
  device const T* columns;
  int left;  // how many there are
  METAL_FUNC void load(thread T* result, int word) const { Block::load_vector(result, columns, word, left); }
};

// Adds the products of Rows rows and one vector, over a lane's columns.
template <int Rows, int Step, typename T, typename Block, typename Source>
METAL_FUNC void add_products(thread float* sums, thread const Block* blocks, thread const Source& vector) {
  constexpr int kSteps = Block::kSteps;
  static_assert(Step == Block::kValues, "a step is decoded at once");
  float unscaled[Rows];
  float total = 0.0f;
  UNROLL for (int row = 0; row < Rows; ++row) unscaled[row] = 0.0f;
  UNROLL for (int word = 0; word < Block::kColumns / (kSteps * Step); ++word) {
    T loaded[kSteps * Step];
    vector.load(loaded, word);
    UNROLL for (int step = 0; step < kSteps; ++step) {
      float x[Step];
      UNROLL for (int i = 0; i < Step; ++i) x[i] = float(loaded[step * Step + i]);
      UNROLL for (int i = 0; i < Step; ++i) total += x[i];
      UNROLL for (int row = 0; row < Rows; ++row) {
        const Values<Step> numbers = blocks[row].numbers(word * kSteps + step);
        UNROLL for (int i = 0; i < Step; ++i) unscaled[row] += numbers.at[i] * x[i];
      }
    }
  }
  UNROLL for (int row = 0; row < Rows; ++row) sums[row] += blocks[row].product(unscaled[row], total);
}

// Does the same for Count vectors, which are `columns` apart. Each weight is decoded once.
template <int Count, int Rows, int Distance, int Step, typename T, typename Block>
METAL_FUNC void add_products_of_vectors(
    thread float* sums, thread const Block* blocks, threadgroup const T* staged, int columns) {
  UNROLL for (int step = 0; step < Block::kColumns / Step; ++step) {
    Values<Step> weights[Rows];
    UNROLL for (int row = 0; row < Rows; ++row) weights[row] = blocks[row].values(step);
    UNROLL for (int v = 0; v < Count; ++v) {
      const StagedVector<Block, Distance, T> vector{staged + v * columns};
      T loaded[Step];
      vector.load_step(loaded, step);
      UNROLL for (int row = 0; row < Rows; ++row) {
        UNROLL for (int i = 0; i < Step; ++i) sums[row * Count + v] += weights[row].at[i] * float(loaded[i]);
      }
    }
  }
}

// The rows that a simdgroup multiplies: Half consecutive rows of each of the two matrices.
template <int Half, typename T, int Bits, int Width>
struct TwoMatrices {
  typedef Weights<T, Bits, Width> Matrix;
  Matrix first, second;

  // Both matrices share S and B. Weights::load_scale explains these types.
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
      // All rows share one branch, because a load behind its own branch would wait for the previous load.
      if constexpr (Bits == kE2M1) {
        load_scales<uchar, uchar>(blocks, column);
      } else if (first.scale_type == kFloat32) {
        load_scales<float, float>(blocks, column);
      } else if (Bits != kE4M3 && first.has_zero_points) {
        load_scales<ushort, uchar>(blocks, column);
      } else {
        load_scales<ushort, ushort>(blocks, column);
      }
    }
  }
};

// Copies a slice of the vectors to threadgroup memory. The elements that all lanes read in one step are adjacent.
// Vectors past group.count are zeros, and so are columns past the last one of the last block.
template <int Count, int Slice, int Threads, typename Block, typename T, typename Group>
METAL_FUNC void stage_vectors(
    threadgroup T* staged,
    thread const VectorRows<T>& vectors,
    thread const Group& group,
    int slice,
    int length,
    uint thread_index) {
  typedef typename VectorOf<T, Block::kValues>::type Vector;
  constexpr int kOfWord = Block::kSteps * Block::kValues, kWords = Block::kColumns / kOfWord;
  constexpr int kDistance = Slice / Block::kColumns * Block::kValues;  // distance between steps
  auto pairs = group.pairs;
  UNROLL for (int v = 0; v < Count; ++v) {
    device const T* source = vectors.for_pair(v < group.count ? pairs.take_first() : 0) + slice;
    const int items = (length + Block::kColumns - 1) / Block::kColumns * kWords;
    for (int item = int(thread_index); item < items; item += Threads) {
      const int block = item / kWords, word = item % kWords;
      T loaded[kOfWord];
      UNROLL for (int i = 0; i < kOfWord; ++i) loaded[i] = T(0);
      const int first = block * Block::kColumns;
      if (v < group.count) Block::load_vector(loaded, source + first, word, length - first);
      threadgroup T* target = staged + v * Slice + word * Block::kSteps * kDistance + block * Block::kValues;
      UNROLL for (int i = 0; i < Block::kSteps; ++i) {
        *(threadgroup Vector*)(target + i * kDistance) = joined<Block::kValues>(loaded + i * Block::kValues);
      }
    }
  }
}

// Computes sums[row * Count + v] for the rows of `weights`. These are each lane's shares, which reduce_to_lanes adds
// up. It multiplies `Count` vectors; the sums of vectors past group.count are not used. The first block of a slice is
// loaded while the vectors are copied.
template <int Count, int Threads, int Half, typename T, int Bits, int Width, typename Group>
METAL_FUNC void multiply_vectors(
    thread float* sums,
    threadgroup T* staged,
    thread const TwoMatrices<Half, T, Bits, Width>& weights,
    thread const VectorRows<T>& vectors,
    thread const Group& group,
    int columns,
    uint thread_index,
    uint lane) {
  typedef Weights<T, Bits, Width> Matrix;
  constexpr int kSlice = staged_columns<T, Count>();
  typedef WeightBlock<Bits, Width> Block;
  constexpr int kStep = 32 * Matrix::kColumns;
  constexpr int kDistance = kSlice / Matrix::kColumns * Block::kValues;  // distance between steps
  static_assert(kSlice % Matrix::kColumns == 0, "a slice holds whole blocks");
  UNROLL for (int i = 0; i < 2 * Half * Count; ++i) sums[i] = 0.0f;
  const int first = int(lane) * Matrix::kColumns;
  for (int slice = 0; slice < columns; slice += kSlice) {
    const int length = min(kSlice, columns - slice);
    WeightBlock<Bits, Width> blocks[2 * Half];
    if (first < length) weights.load(blocks, slice + first);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_vectors<Count, kSlice, Threads, Block>(staged, vectors, group, slice, length, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int column = first; column < length; column += kStep) {
      threadgroup const T* x = staged + column / Matrix::kColumns * Block::kValues;
      if constexpr (Count == 1) {
        const StagedVector<Block, kDistance, T> vector{x};
        add_products<2 * Half, Block::kValues, T>(sums, blocks, vector);
      } else {
        add_products_of_vectors<Count, 2 * Half, kDistance, Block::kValues>(sums, blocks, x, kSlice);
      }
      if (column + kStep < length) weights.load(blocks, slice + column + kStep);
    }
  }
}

// One round of reduce_to_lanes. A lane has 2 Size values. It keeps the half that bit Size of its index selects, and
// passes the other half to the lane that keeps that half.
template <int Size>
METAL_FUNC void halve_values(thread float* values, uint lane) {
  if constexpr (Size > 0) {
    const bool keeps_upper = (lane & uint(Size)) != 0;
    UNROLL for (int i = 0; i < Size; ++i) {
      const float lower = values[i], upper = values[Size + i];  // read before the choice, to stay in registers
      const float handed = keeps_upper ? lower : upper;
      values[i] = (keeps_upper ? upper : lower) + simd_shuffle_xor(handed, ushort(Size));
    }
    halve_values<Size / 2>(values, lane);
  }
}

// Adds up values[i] over each `Lanes` neighbours, for each i. Lane l returns the sum of values[l % Count]. Overwrites
// `values`. For 32 values it takes 31 shuffles, while one simd_sum per value would take 160.
template <int Count, int Lanes = 32>
METAL_FUNC float reduce_to_lanes(thread float* values, uint lane) {
  static_assert(Count <= Lanes && (Count & (Count - 1)) == 0, "each value has a lane");
  halve_values<Count / 2>(values, lane);
  float sum = values[0];
  UNROLL for (int distance = Count; distance < Lanes; distance *= 2) sum += simd_shuffle_xor(sum, ushort(distance));
  return sum;
}
