// Products of small matrices for one instruction set. A tile of kRows x (kVectors * kLanes) sums stays in registers:
// with 512-bit vectors 8 x 32 in 16 of 32 registers, so that a multiplication needs 10 loads for its 16 multiply-adds.

typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef float VectorInMemory __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint32_t WordsInMemory __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

constexpr int64_t kTileColumns = kVectors * kLanes;
static_assert(kColumns % kTileColumns == 0 && kRowsAtOnce % kRows == 0);

TORCH_GDN_INLINE Vector load(const float* x) { return *reinterpret_cast<const VectorInMemory*>(x); }
TORCH_GDN_INLINE Words load(const Pair* x) { return *reinterpret_cast<const WordsInMemory*>(x); }
TORCH_GDN_INLINE void store(float* x, Vector value) { *reinterpret_cast<VectorInMemory*>(x) = value; }
TORCH_GDN_INLINE void store(Pair* x, Words value) { *reinterpret_cast<WordsInMemory*>(x) = value; }
// Into the second-level cache; an address beyond the end does no harm.
TORCH_GDN_INLINE void prefetch(const void* x) { __builtin_prefetch(x, 0, 2); }

TORCH_GDN_INLINE Vector multiply_add(float a, Vector b, Vector sum) { return sum + a * b; }
#if TORCH_GDN_ISA_HAS_BF16
TORCH_GDN_INLINE Vector multiply_add(Pair a, Words b, Vector sum) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
}
#endif

struct Tile {
  Vector at[kRows][kVectors];
};

TORCH_GDN_INLINE Tile zero_tile() { return Tile{}; }

// tile += a b, where a(i, p) is a[i * row + p * step], and b [count, 32].
template <typename Operand>
TORCH_GDN_INLINE void accumulate(Tile& tile, const Operand* a, int64_t row, int64_t step, const Operand* b,
                                 int64_t count) {
  Tile sums = tile;
  for (int64_t p = 0; p < count; ++p, a += step, b += kColumns) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int64_t j = 0; j < kVectors; ++j) {
        sums.at[i][j] = multiply_add(a[i * row], load(b + j * kLanes), sums.at[i][j]);
      }
    }
  }
  tile = sums;
}

TORCH_GDN_INLINE Tile scaled_rows(Tile tile, const float* factor) {
#pragma GCC unroll 8
  for (int64_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < kVectors; ++j) tile.at[i][j] *= factor[i];
  }
  return tile;
}

TORCH_GDN_INLINE void store_tile(const Tile& tile, float* out) {
#pragma GCC unroll 8
  for (int64_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < kVectors; ++j) store(out + i * kColumns + j * kLanes, tile.at[i][j]);
  }
}

// A tile, or numbers of a row, as what a later product multiplies.
TORCH_GDN_INLINE void store_operand(const Tile& tile, float* out) { store_tile(tile, out); }
TORCH_GDN_INLINE void store_operand(const float* x, int64_t count, float* out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = x[i];
}

#if TORCH_GDN_ISA_HAS_BF16
typedef uint16_t HalfWords __attribute__((vector_size(2 * kLanes)));
TORCH_GDN_INLINE Words narrowed(Vector x) {
  return __builtin_convertvector((HalfWords)_mm512_cvtneps_pbh((__m512)x), Words);
}
// Rows 2p and 2p + 1 of a tile as one row of pairs.
TORCH_GDN_INLINE void store_operand(const Tile& tile, Pair* out) {
#pragma GCC unroll 8
  for (int64_t i = 0; i < kRows; i += 2) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < kVectors; ++j) {
      const Words low = narrowed(tile.at[i][j]), high = narrowed(tile.at[i + 1][j]);
      store(out + i / 2 * kColumns + j * kLanes, low | high << 16);
    }
  }
}
TORCH_GDN_INLINE void store_operand(const float* x, int64_t count, Pair* out) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const auto narrow = (__m256i)_mm512_cvtneps_pbh((__m512)load(x + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i / 2), narrow);
  }
}
#endif
