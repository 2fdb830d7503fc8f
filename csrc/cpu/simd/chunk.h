// The kernels of ChunkKernels for one ISA variant. One core processes each chunk and panel. The panel of the state, 16
// KB, stays in the core's first-level cache while the rows of the chunk are processed.

// A tile of kRows x (kVectors * kLanes) sums stays in registers. With 512-bit vectors it is 8 x 32 and takes 16 of 32
// registers. A multiplication then needs 10 loads for its 16 multiply-adds.
constexpr int64_t kRows = kRegisters / 4, kVectors = 2, kTileColumns = kVectors * kLanes;
static_assert(kColumns % kTileColumns == 0 && kRowsAtOnce % kRows == 0);

#if TORCH_GDN_ISA_HAS_BF16
TORCH_GDN_INLINE Floats multiply_add(Pair a, Words b, Floats sum) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
}
#endif

struct Tile {
  Floats at[kRows][kVectors];
};

// Calls f(i, j) for each vector of a tile.
template <typename F>
TORCH_GDN_INLINE void for_each_in_tile(const F& f) {
#pragma GCC unroll 8
  for (int64_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < kVectors; ++j) f(i, j);
  }
}

// Computes tile += a b, where a(i, p) is a[i * row + p * step], and rows of b are `b_row` elements apart.
template <typename Operand>
TORCH_GDN_INLINE void accumulate(Tile& tile, const Operand* a, int64_t row, int64_t step, const Operand* b,
                                 int64_t count, int64_t b_row = kColumns) {
  Tile sums = tile;
  for (int64_t p = 0; p < count; ++p, a += step, b += b_row) {
    for_each_in_tile(
        [&](int64_t i, int64_t j) { sums.at[i][j] = multiply_add(a[i * row], load(b + j * kLanes), sums.at[i][j]); });
  }
  tile = sums;
}

TORCH_GDN_INLINE Tile scaled_rows(Tile tile, const float* factor) {
  for_each_in_tile([&](int64_t i, int64_t j) { tile.at[i][j] *= factor[i]; });
  return tile;
}

TORCH_GDN_INLINE void store_tile(const Tile& tile, float* out) {
  for_each_in_tile([&](int64_t i, int64_t j) { store(out + i * kColumns + j * kLanes, tile.at[i][j]); });
}

TORCH_GDN_INLINE Tile load_tile(const float* in) {
  Tile tile;
  for_each_in_tile([&](int64_t i, int64_t j) { tile.at[i][j] = load(in + i * kColumns + j * kLanes); });
  return tile;
}

// True if the left operand of a product has the pairs of a row next to each other, even if it is k^T.
#if TORCH_GDN_ISA_HAS_AMX || TORCH_GDN_ISA_HAS_BFMMLA
constexpr bool kHasRowsOfPairs = true;
#else
constexpr bool kHasRowsOfPairs = false;
#endif

#if TORCH_GDN_ISA_HAS_AMX
constexpr int64_t kLongStep = 16, kShortStep = 4;  // the number of pairs that one product of AMX tiles sums over
static_assert(kRowsAtOnce % (2 * kShortStep) == 0 && kRows == 8 && kTileColumns == kColumns);

enum AmxTile { kLeftSums, kRightSums, kLongA, kLongLeftB, kLongRightB, kShortA, kShortLeftB, kShortRightB };

// Sets the shapes of a core's AMX tiles while the core uses them.
class AmxTiles {
 public:
  TORCH_GDN_INLINE AmxTiles() {
    constexpr struct {
      uint8_t palette = 1, first_row = 0, reserved[14] = {};
      uint16_t bytes_of_row[16] = {64, 64, 4 * kLongStep, 64, 64, 4 * kShortStep, 64, 64};
      uint8_t rows[16] = {kRows, kRows, kRows, kLongStep, kLongStep, kRows, kShortStep, kShortStep};
    } kShapes;
    asm volatile("ldtilecfg %0" ::"m"(kShapes));
  }
  TORCH_GDN_INLINE ~AmxTiles() { asm volatile("tilerelease"); }
};

// In g++ 12 these are macros that take only literal numbers, and the compiler does not know what they read.
template <AmxTile To, typename T>
TORCH_GDN_INLINE void load_amx(const T* from, int64_t row) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(To), "r"(from), "r"(row * sizeof(T)) : "memory");
}
template <AmxTile Sums>
TORCH_GDN_INLINE void zero_amx() {
  asm volatile("tilezero %%tmm%c0" ::"i"(Sums));
}
template <AmxTile From>
TORCH_GDN_INLINE void store_amx(float* to, int64_t row) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(From), "r"(to), "r"(row * sizeof(float)) : "memory");
}
template <AmxTile Sums, AmxTile A, AmxTile B>
TORCH_GDN_INLINE void multiply_add_amx() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(A), "i"(B));
}

template <AmxTile A, AmxTile Left, AmxTile Right>
TORCH_GDN_INLINE void multiply_add_amx(const Pair* a, int64_t row, const Pair* b) {
  load_amx<A>(a, row);
  load_amx<Left>(b, kColumns);
  multiply_add_amx<kLeftSums, A, Left>();
  load_amx<Right>(b + kColumns / 2, kColumns);
  multiply_add_amx<kRightSums, A, Right>();
}

// `step` is 1.
TORCH_GDN_INLINE void accumulate(Tile& tile, const Pair* a, int64_t row, int64_t, const Pair* b, int64_t count) {
  zero_amx<kLeftSums>();
  zero_amx<kRightSums>();
  for (; count >= kLongStep; count -= kLongStep, a += kLongStep, b += kLongStep * kColumns) {
    multiply_add_amx<kLongA, kLongLeftB, kLongRightB>(a, row, b);
  }
  for (; count > 0; count -= kShortStep, a += kShortStep, b += kShortStep * kColumns) {
    multiply_add_amx<kShortA, kShortLeftB, kShortRightB>(a, row, b);
  }
  alignas(64) float sums[kRows * kColumns];
  store_amx<kLeftSums>(sums, kColumns);
  store_amx<kRightSums>(sums + kColumns / 2, kColumns);
  for_each_in_tile([&](int64_t i, int64_t j) { tile.at[i][j] += load(sums + i * kColumns + j * kLanes); });
}
#elif TORCH_GDN_ISA_HAS_BFMMLA
static_assert(kRowsAtOnce % 4 == 0 && kRows == 8 && kTileColumns == 8 && kLanes == 4);

TORCH_GDN_INLINE bfloat16x8_t join(uint32x2_t low, uint32x2_t high) {
  return vreinterpretq_bf16_u32(vcombine_u32(low, high));
}

// One instruction multiplies 2 rows by 2 columns over two pairs. The result is 16 blocks of 2 x 2 sums. `step` is 1.
TORCH_GDN_INLINE void accumulate(Tile& tile, const Pair* a, int64_t row, int64_t, const Pair* b, int64_t count) {
  float32x4_t sums[kRows / 2][kTileColumns / 2] = {};
  for (int64_t p = 0; p < count; p += 2, a += 2, b += 2 * kColumns) {
    bfloat16x8_t columns[kTileColumns / 2];
#pragma GCC unroll 2
    for (int64_t j = 0; j < kVectors; ++j) {
      const uint32x4_t first = vld1q_u32(b + j * kLanes), second = vld1q_u32(b + kColumns + j * kLanes);
      columns[2 * j] = vreinterpretq_bf16_u32(vzip1q_u32(first, second));
      columns[2 * j + 1] = vreinterpretq_bf16_u32(vzip2q_u32(first, second));
    }
#pragma GCC unroll 4
    for (int64_t i = 0; i < kRows / 2; ++i) {
      const bfloat16x8_t rows = join(vld1_u32(a + 2 * i * row), vld1_u32(a + (2 * i + 1) * row));
#pragma GCC unroll 4
      for (int64_t j = 0; j < kTileColumns / 2; ++j) sums[i][j] = vbfmmlaq_f32(sums[i][j], rows, columns[j]);
    }
  }
#pragma GCC unroll 4
  for (int64_t i = 0; i < kRows / 2; ++i) {
#pragma GCC unroll 2
    for (int64_t j = 0; j < kVectors; ++j) {
      const float64x2_t left = (float64x2_t)sums[i][2 * j], right = (float64x2_t)sums[i][2 * j + 1];
      tile.at[2 * i][j] += (Floats)vzip1q_f64(left, right);
      tile.at[2 * i + 1][j] += (Floats)vzip2q_f64(left, right);
    }
  }
}
#endif

// Converts a tile, or the numbers of a row, to the operand of a later product.
TORCH_GDN_INLINE void store_operand(const Tile& tile, float* out) { store_tile(tile, out); }
TORCH_GDN_INLINE void store_operand(const float* x, int64_t count, float* out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = x[i];
}

#if TORCH_GDN_ISA_HAS_BF16
TORCH_GDN_INLINE Halves downcast(Floats x) { return (Halves)_mm512_cvtneps_pbh((__m512)x); }
#elif TORCH_GDN_ISA_HAS_BFMMLA
TORCH_GDN_INLINE Halves downcast(Floats x) { return (Halves)vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)x)); }
#endif

#if TORCH_GDN_ISA_HAS_BF16 || TORCH_GDN_ISA_HAS_BFMMLA
// Stores rows 2p and 2p + 1 of a tile as one row of pairs.
TORCH_GDN_INLINE void store_operand(const Tile& tile, Pair* out) {
#pragma GCC unroll 8
  for (int64_t i = 0; i < kRows; i += 2) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < kVectors; ++j) {
      const Words low = to_words(downcast(tile.at[i][j])), high = to_words(downcast(tile.at[i + 1][j]));
      store(out + i / 2 * kColumns + j * kLanes, low | high << 16);
    }
  }
}
TORCH_GDN_INLINE void store_operand(const float* x, int64_t count, Pair* out) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const Halves halves = downcast(load(x + i));
    __builtin_memcpy(out + i / 2, &halves, sizeof(halves));
  }
}
#endif

TORCH_GDN_INLINE void upcast_rows(const HeadRows& in, int64_t tokens, int64_t rows, int64_t count, float* out,
                                  int64_t out_width) {
  for (int64_t i = 0; i < tokens; ++i) {
    upcast_row(in.data + i * in.stride, in.dtype, count, out + i * out_width);
    for (int64_t j = count; j < out_width; ++j) out[i * out_width + j] = 0;
  }
  for (int64_t i = tokens * out_width; i < rows * out_width; ++i) out[i] = 0;
}

TORCH_GDN_INLINE void downcast_rows(const float* in, int64_t in_width, int64_t tokens, int64_t count,
                                    const HeadRows& out) {
  for (int64_t i = 0; i < tokens; ++i) {
    downcast_row(in + i * in_width, count, out.dtype, out.data + i * out.stride);
  }
}

TORCH_GDN_INLINE void read_rows(const HeadRows& in, int64_t width, const KeyTiles<float>& tiles, float* out) {
  upcast_rows(in, tiles.tokens, tiles.rows, width, out, tiles.K);
}

// Adjacent bf16 numbers are pairs already.
TORCH_GDN_INLINE void read_rows(const HeadRows& in, int64_t width, const KeyTiles<Pair>& tiles, Pair* out) {
  const int64_t length = tiles.K / 2;
  for (int64_t i = 0; i < tiles.tokens; ++i) {
    out[i * length + width / 2] = 0;  // if the width is odd, the last pair is half full
    for (int64_t j = ceil_div(width, 2); j < length; ++j) out[i * length + j] = 0;
    __builtin_memcpy(out + i * length, in.data + i * in.stride, width * 2);
  }
  for (int64_t i = tiles.tokens * length; i < tiles.rows * length; ++i) out[i] = 0;
}

TORCH_GDN_INLINE float sum_of_squares(const Pair* x, int64_t count) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < count; ++j) {
    const float low = std::bit_cast<float>(x[j] << 16), high = std::bit_cast<float>(x[j] & 0xFFFF0000);
    sum += low * low + high * high;
  }
  return sum;
}

template <typename Operand>
TORCH_GDN_INLINE void make_factors(const Operand* x, bool normalise, float scale, const KeyTiles<Operand>& tiles,
                                   float* factor) {
  const int64_t length = tiles.K / kTogether<Operand>;
  for (int64_t i = 0; i < tiles.rows; ++i) {
    factor[i] = scale;
    if (normalise) factor[i] *= 1.0f / __builtin_sqrtf(sum_of_squares(x + i * length, length) + kNormEps);
  }
}

// Transposes [rows, length] to [length, 32].
template <typename Operand>
TORCH_GDN_INLINE void transpose(const Operand* in, int64_t rows, int64_t length, Operand* out) {
  for (int64_t i = 0; i < rows; i += kRowsAtOnce) {
    for (int64_t j = 0; j < length; ++j) {
#pragma GCC unroll 8
      for (int64_t r = 0; r < kRowsAtOnce; ++r) out[j * kTokens + i + r] = in[(i + r) * length + j];
    }
  }
}

// Stores rows 2p and 2p + 1 of [rows, length] pairs of columns as pairs of rows. The result is [rows / 2, 2 * length],
// or [2 * length, 16] if kHasRowsOfPairs.
TORCH_GDN_INLINE void pair_rows(const Pair* in, int64_t rows, int64_t length, Pair* out) {
  const int64_t row = kHasRowsOfPairs ? 1 : 2 * length, column = kHasRowsOfPairs ? kTokens / 2 : 1;
  for (int64_t i = 0; i < rows; i += 2, in += 2 * length, out += row) {
#pragma omp simd
    for (int64_t j = 0; j < length; ++j) {
      const Pair even = in[j], odd = in[length + j];
      out[2 * j * column] = (even & 0xFFFF) | (odd << 16);
      out[(2 * j + 1) * column] = (even >> 16) | (odd & 0xFFFF0000);
    }
  }
}

// Computes a k^T up to the diagonal.
template <typename Operand>
TORCH_GDN_INLINE void multiply_by_keys(const Operand* a, const KeyTiles<Operand>& tiles, float* out) {
  const int64_t length = tiles.K / kTogether<Operand>;
  for (int64_t i = 0; i < tiles.rows; i += kRows) {
    for (int64_t j = 0; j < i + kRows; j += kTileColumns) {
      Tile tile{};
      accumulate(tile, a + i * length, length, 1, tiles.k_across + j, length);
      store_tile(tile, out + i * kTokens + j);
    }
  }
}

TORCH_GDN_INLINE int64_t item_size(at::ScalarType dtype) { return dtype == at::kFloat ? 4 : 2; }

// Rows are kilobytes apart, and processors do not predict which row comes next. Rows to read are therefore fetched one
// chunk ahead. Rows to write are fetched when their chunk begins.
TORCH_GDN_INLINE void prefetch_rows(const HeadRows& rows, int64_t first, int64_t count, int64_t columns) {
  const int64_t bytes = columns * item_size(rows.dtype);
  for (int64_t i = first; i < first + count; ++i) {
    for (int64_t at = 0; at < bytes; at += 64) prefetch(rows.data + i * rows.stride + at);
  }
}

template <typename Operand>
void read_keys(const HeadRows& q, const HeadRows& k, int64_t width, bool normalise, float scale,
               KeyTiles<Operand>& tiles) {
  const int64_t length = tiles.K / kTogether<Operand>;
#if TORCH_GDN_ISA_HAS_AMX
  const AmxTiles amx;
#endif
  prefetch_rows(q, kTokens, tiles.tokens, width);
  prefetch_rows(k, kTokens, tiles.tokens, width);
  read_rows(q, width, tiles, tiles.q);
  read_rows(k, width, tiles, tiles.k);
  make_factors(tiles.q, normalise, scale, tiles, tiles.q_factor);
  make_factors(tiles.k, normalise, 1.0f, tiles, tiles.k_factor);
  transpose(tiles.k, tiles.rows, length, tiles.k_across);
  if constexpr (kTogether<Operand> == 2) pair_rows(tiles.k, tiles.rows, length, tiles.k_down);
  multiply_by_keys(tiles.k, tiles, tiles.k_k);
  multiply_by_keys(tiles.q, tiles, tiles.q_k);
}

// The cumulative sum is in f64, so that exp(c_i - c_j) loses no digits to a large c. After the chunk it stays constant,
// and beta is 0.
template <typename Operand>
void make_head(const KeyTiles<Operand>& keys, const Gates& gates, HeadTiles<Operand>& head) {
  double sums[kTokens], sum = 0;
  for (int64_t i = 0; i < keys.rows; ++i) {
    const bool inside = i < keys.tokens;
    if (inside) sum += clamped_log_decay(number_at(gates.g, i));
    sums[i] = sum;
    head.beta[i] = inside ? number_at(gates.beta, i) : 0.0f;
  }
  for (int64_t i = keys.rows; i < kTokens; ++i) {  // read, but no result depends on it
    sums[i] = sum;
    head.beta[i] = 0.0f;
  }
  const auto [base, change] = decay_parts(all_lanes(static_cast<float>(sum)));
  head.base = base[0], head.change = change[0];
  alignas(64) float passed[kTokens], left[kTokens];
#pragma omp simd
  for (int64_t i = 0; i < kTokens; ++i) {
    passed[i] = static_cast<float>(sums[i]);
    left[i] = static_cast<float>(sum - sums[i]);
  }
  for (int64_t i = 0; i < keys.rows; i += kLanes) {
    const Floats decay = exponential(load(passed + i)), k_factor = load(keys.k_factor + i);
    store(head.reading + i, load(head.beta + i) * k_factor * decay);
    store(head.querying + i, load(keys.q_factor + i) * decay);
    store(head.writing + i, k_factor * exponential(load(left + i)));
  }
  for (int64_t i = 0; i < keys.rows; ++i) {
    alignas(64) float decays[kTokens], scores[kTokens];
    const float update = -head.beta[i] * keys.k_factor[i], query = keys.q_factor[i];
    const float *k_k = keys.k_k + i * kTokens, *q_k = keys.q_k + i * kTokens;
    float* out = head.update + i * kTokens;
    const int64_t columns = i < kTokens / 2 ? kTokens / 2 : kTokens;
    const double here = sums[i];
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) decays[j] = static_cast<float>(here - sums[j]);
    for (int64_t j = i; j < columns; ++j) decays[j] = 0.0f;
    for (int64_t j = 0; j < columns; j += kLanes) {
      const Floats decay = exponential(load(decays + j)) * load(keys.k_factor + j);
      store(out + j, update * load(k_k + j) * decay);
      store(scores + j, query * load(q_k + j) * decay);
    }
    for (int64_t j = i; j < columns; ++j) out[j] = 0.0f;
    for (int64_t j = i + 1; j < columns; ++j) scores[j] = 0.0f;
    store_operand(scores, columns, head.scores + i * kTokens / kTogether<Operand>);
  }
}

// Computes v_new of kRows rows from the state and from the v_new of earlier rows. This is forward substitution, in
// registers.
template <typename Operand, typename Keys, typename Head>
TORCH_GDN_INLINE Tile solve_rows(const Keys& keys, const Head& head, int64_t i, int64_t j, const Operand* state,
                                 const PanelTiles<Operand>& tiles) {
  const int64_t length = keys.K / kTogether<Operand>;
  Tile tile{};
  accumulate(tile, keys.k + i * length, length, 1, state + j, length);
  for_each_in_tile([&](int64_t r, int64_t c) {
    const Floats v = load(tiles.v + (i + r) * kColumns + j + c * kLanes);
    tile.at[r][c] = head.beta[i + r] * v - head.reading[i + r] * tile.at[r][c];
  });
  const float* update = head.update + i * kTokens;
  accumulate(tile, update, kTokens, 1, tiles.v_new + j, i);
#pragma GCC unroll 8
  for (int64_t before = 0; before + 1 < kRows; ++before) {
#pragma GCC unroll 8
    for (int64_t r = before + 1; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int64_t c = 0; c < kVectors; ++c) {
        tile.at[r][c] = multiply_add(update[r * kTokens + i + before], tile.at[before][c], tile.at[r][c]);
      }
    }
  }
  return tile;
}

// Computes o of kRows rows, which is the part from the state plus the part from the chunk's own tokens.
template <typename Operand, typename Keys, typename Head>
TORCH_GDN_INLINE Tile answer_rows(const Keys& keys, const Head& head, int64_t i, int64_t j, const Operand* state,
                                  const Operand* v_new) {
  const int64_t length = keys.K / kTogether<Operand>, width = kTokens / kTogether<Operand>;
  Tile tile{};
  accumulate(tile, keys.q + i * length, length, 1, state + j, length);
  tile = scaled_rows(tile, head.querying + i);
  accumulate(tile, head.scores + i * width, width, 1, v_new + j, (i + kRows) / kTogether<Operand>);
  return tile;
}

// Computes S <- exp(c_last) S + k^T (exp(c_last - c) v_new). decay(i) is the decay of row i of S, as base and change.
template <typename Operand, typename Keys, typename Decay>
TORCH_GDN_INLINE void update_state(const Keys& keys, const Operand* k, const Decay& decay,
                                   const PanelTiles<Operand>& tiles, float* state, Operand* operand) {
  constexpr bool paired = kTogether<Operand> == 2;
  for (int64_t i = 0; i < keys.K; i += kRows) {
    for (int64_t j = 0; j < kColumns; j += kTileColumns) {
      float* at = state + i * kColumns + j;
      Tile tile{};  // the sum over all tokens, rounded once with the decay: each term may be small compared with S
      const auto [row, step] = kHasRowsOfPairs ? std::pair(kTokens / 2, int64_t{1}) : std::pair(int64_t{1}, keys.K);
      accumulate(tile, k + i * row, row, step, tiles.writing + j, keys.rows / kTogether<Operand>);
      for_each_in_tile([&](int64_t r, int64_t c) {
        const auto [base, change] = decay(i + r);
        const Floats before = load(at + r * kColumns + c * kLanes);
        tile.at[r][c] = base * before + (change * before + tile.at[r][c]);
      });
      store_tile(tile, at);
      if constexpr (paired) store_operand(tile, operand + i / 2 * kColumns + j);
    }
  }
}

// `k_writing` holds the keys that the update of the state multiplies.
template <typename Operand, typename Keys, typename Head, typename Decay>
TORCH_GDN_INLINE void advance_panel(const Keys& keys, const Head& head, const Operand* k_writing, const Decay& decay,
                                    const HeadRows& v, const HeadRows& o, int64_t columns, float* state,
                                    Operand* operand, PanelTiles<Operand>& tiles) {
  prefetch_rows(o, 0, keys.tokens, columns);
  prefetch_rows(v, kTokens, keys.tokens, columns);
  upcast_rows(v, keys.tokens, keys.rows, columns, tiles.v, kColumns);
  for (int64_t j = 0; j < kColumns; j += kTileColumns) {
    for (int64_t i = 0; i < keys.rows; i += kRows) {
      const Tile v_new = solve_rows(keys, head, i, j, operand, tiles);
      const int64_t row = i / kTogether<Operand> * kColumns + j;
      store_tile(v_new, tiles.v_new + i * kColumns + j);
      store_operand(scaled_rows(v_new, head.writing + i), tiles.writing + row);
      const Operand* answering;
      if constexpr (kTogether<Operand> == 2) {
        store_operand(v_new, tiles.v_new_down + row);
        answering = tiles.v_new_down;
      } else {
        answering = tiles.v_new;
      }
      store_tile(answer_rows(keys, head, i, j, operand, answering), tiles.o + i * kColumns + j);
    }
  }
  update_state(keys, k_writing, decay, tiles, state, operand);
  downcast_rows(tiles.o, kColumns, keys.tokens, columns, o);
}

template <typename Operand>
void advance(const KeyTiles<Operand>& keys, const HeadTiles<Operand>& head, const HeadRows& v, const HeadRows& o,
             int64_t columns, float* state, Operand* operand, PanelTiles<Operand>& tiles) {
#if TORCH_GDN_ISA_HAS_AMX
  const AmxTiles amx;
#endif
  const Operand* k_writing = kTogether<Operand> == 2 ? keys.k_down : keys.k;
  const auto decay = [&](int64_t) __attribute__((always_inline)) { return std::pair(head.base, head.change); };
  advance_panel(keys, head, k_writing, decay, v, o, columns, state, operand, tiles);
}

template <typename Operand>
void make_operand(const float* state, int64_t K, Operand* operand) {
  for (int64_t i = 0; i < K; i += kRows) {
    for (int64_t j = 0; j < kColumns; j += kTileColumns) {
      store_operand(load_tile(state + i * kColumns + j), operand + i / kTogether<Operand> * kColumns + j);
    }
  }
}

template <typename Operand>
constexpr ChunkKernels<Operand> kChunkKernels = {&read_keys<Operand>, &make_head<Operand>, &advance<Operand>,
                                                 &make_operand<Operand>};
