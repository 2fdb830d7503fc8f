// Implements AuraKernels for one ISA variant. In pass 1 of attention to codes, some query rows share a tile of
// dequantised keys and values.
#include "cpu/simd/trellis.h"

constexpr int kHeads = 4;  // query rows that share loads of keys and values

// Computes scores[row][key] = q[row] . keys[key] for kLanes pairs at once. Each pair has a vector of partial sums.
// These vectors are reduced to one vector of sums.
template <int kRows>
TORCH_GDN_INLINE void dot_rows(const float* q, const float* keys, int64_t count, int64_t width, float* scores) {
  constexpr int kKeys = kLanes / kRows;
  for (int64_t t = 0; t < count; t += kKeys) {
    Floats sums[kLanes] = {};
    for (int64_t d = 0; d < width; d += kLanes) {
      Floats key[kKeys];
#pragma GCC unroll 16
      for (int k = 0; k < kKeys; ++k) key[k] = load(keys + (t + k) * width + d);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        const Floats query = load(q + row * width + d);
#pragma GCC unroll 16
        for (int k = 0; k < kKeys; ++k) sums[row * kKeys + k] += query * key[k];
      }
    }
    float dots[kLanes];
    store(dots, sums_of_lanes(sums));
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      __builtin_memcpy(scores + row * kTileKeys + t, dots + row * kKeys, kKeys * sizeof(float));
    }
  }
}

void dot_products(const AuraTile& tile) {
  int64_t row = 0;
  for (; row + kHeads <= tile.rows; row += kHeads) {
    dot_rows<kHeads>(tile.q + row * tile.width, tile.keys, tile.count, tile.width, tile.scores + row * kTileKeys);
  }
  for (; row < tile.rows; ++row) {
    dot_rows<1>(tile.q + row * tile.width, tile.keys, tile.count, tile.width, tile.scores + row * kTileKeys);
  }
}

// Computes o[row] += sum over keys of weights[row][key] values[key].
template <int kRows>
TORCH_GDN_INLINE void add_rows(const float* weights, const float* values, int64_t count, int64_t width, float* o) {
  constexpr int kVectors = 2;
  for (int64_t d = 0; d < width; d += kVectors * kLanes) {
    Floats sums[kRows][kVectors] = {};
    for (int64_t t = 0; t < count; ++t) {
      const Floats first = load(values + t * width + d), second = load(values + t * width + d + kLanes);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        const Floats weight = all_lanes(weights[row * kTileKeys + t]);
        sums[row][0] += weight * first;
        sums[row][1] += weight * second;
      }
    }
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      float* to = o + row * width + d;
      store(to, load(to) + sums[row][0]);
      store(to + kLanes, load(to + kLanes) + sums[row][1]);
    }
  }
}

void add_weighted(const AuraTile& tile) {
  int64_t row = 0;
  for (; row + kHeads <= tile.rows; row += kHeads) {
    add_rows<kHeads>(tile.scores + row * kTileKeys, tile.values, tile.count, tile.width, tile.o + row * tile.width);
  }
  for (; row < tile.rows; ++row) {
    add_rows<1>(tile.scores + row * kTileKeys, tile.values, tile.count, tile.width, tile.o + row * tile.width);
  }
}

// Turns the dot products of one row into weights of the values' centroids. The row sees keys [from, to). Other keys get
// the weight 0, even if their norm is not finite.
void online_softmax(const AuraTile& tile, int64_t row, int64_t from, int64_t to) {
  float* scores = tile.scores + row * kTileKeys;
  AuraRow& state = tile.states[row];
  Integers number;
  for (int lane = 0; lane < kLanes; ++lane) number[lane] = lane;
  const auto is_seen = [&](int64_t t) __attribute__((always_inline)) {
    const Integers key = number + static_cast<int32_t>(t);
    return (key >= static_cast<int32_t>(from)) & (key < static_cast<int32_t>(to));
  };
  Floats largest = all_lanes(state.m);
  for (int64_t t = 0; t < kTileKeys; t += kLanes) {
    const Floats score = load(scores + t) * load(tile.key_norms + t) + state.tile_score;
    const Floats seen = is_seen(t) ? score : all_lanes(-__builtin_inff());
    largest = seen > largest ? seen : largest;
    store(scores + t, seen);
  }
  float m = state.m;
  for (int lane = 0; lane < kLanes; ++lane) m = largest[lane] > m ? largest[lane] : m;
  const float shift = m == -__builtin_inff() ? -__FLT_MAX__ : m;  // every score is -inf or NaN
  Floats sum = {};
  for (int64_t t = 0; t < kTileKeys; t += kLanes) {
    const Floats none = {}, weight = exponential(load(scores + t) - shift);
    sum += weight;
    store(scores + t, is_seen(t) ? weight * load(tile.value_norms + t) : none);
  }
  const float decay = exponential(all_lanes(state.m - shift))[0];
  state.m = m;
  state.l = state.l * decay + sum_of_lanes(sum);
  if (decay == 1.0f) return;
  for (float* o = tile.o + row * tile.width; o < tile.o + (row + 1) * tile.width; o += kLanes) {
    store(o, load(o) * decay);
  }
}

// Finds the code bit by bit, from the highest bit.
void quantise(const float* y, const float* boundaries, int64_t D, int64_t bits, int32_t* codes) {
  for (int64_t d = 0; d < D; ++d) codes[d] = 0;
  for (int32_t step = 1 << (bits - 1); step > 0; step /= 2) {
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) codes[d] += y[d] > boundaries[codes[d] + step - 1] ? step : 0;
  }
}

void multiply_by_sylvester(float* x, int64_t D, int64_t width) {
  for (int64_t half = 1; half < width; half *= 2) {
    for (int64_t first = 0; first < D; first += 2 * half) {
#pragma omp simd
      for (int64_t i = first; i < first + half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
    }
  }
}

#if TORCH_GDN_LANES == 16

// Returns the centroids that the low bits of 16 numbers select: 4 bits for 16 centroids, 5 for 32, 6 for 64.
template <int kVectors>
TORCH_GDN_INLINE __m512 selected(const __m512 (&table)[kVectors], __m512i numbers) {
  if constexpr (kVectors == 1) {
    return _mm512_maskz_permutexvar_ps(0xFFFF, numbers, table[0]);
  } else if constexpr (kVectors == 2) {
    return _mm512_permutex2var_ps(table[0], numbers, table[1]);
  } else {
    return _mm512_mask_blend_ps(_mm512_test_epi32_mask(numbers, _mm512_set1_epi32(32)),
                                _mm512_permutex2var_ps(table[0], numbers, table[1]),
                                _mm512_permutex2var_ps(table[2], numbers, table[3]));
  }
}

// Decodes 16 codes of 2 to 5 bits. The two bytes that hold a code's window are moved into its lane and shifted. The
// windows of a trellis code reach into the byte after the 16 codes. At the end of the row this is the first byte.
template <int kBits, int kWindow>
TORCH_GDN_INLINE void dequantise_short(const Dequantise& codes) {
  constexpr int kVectors = kWindow <= 4 ? 1 : 1 << (kWindow - 4);
  alignas(64) uint8_t positions[64];
  alignas(64) uint32_t shifts[16];
  for (int lane = 0; lane < 16; ++lane) {
    const int bit = lane * kBits;
    positions[4 * lane] = static_cast<uint8_t>(bit / 8);
    positions[4 * lane + 1] = static_cast<uint8_t>(bit / 8 + 1);
    positions[4 * lane + 2] = positions[4 * lane + 3] = 0x80;  // zero
    shifts[lane] = bit % 8;
  }
  const __m512i position = _mm512_load_si512(positions);
  const Words shift = (Words)_mm512_load_si512(shifts);
  __m512 centroids[kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) centroids[i] = _mm512_load_ps(codes.table->centroids + 16 * i);
  constexpr int kBytes = 2 * kBits;  // bytes of 16 codes
  for (int64_t row = 0; row < codes.rows; ++row) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(codes.words + row * codes.stride);
    const uint8_t first = bytes[0];
    float* out = codes.out + row * codes.width;
    for (int64_t d = 0; d < codes.D; d += 16, bytes += kBytes) {
      __m128i group = _mm_maskz_loadu_epi8((1u << kBytes) - 1, bytes);
      if constexpr (kWindow > kBits) group = _mm_insert_epi8(group, d + 16 < codes.D ? bytes[kBytes] : first, kBytes);
      const __m512i pairs = _mm512_shuffle_epi8(_mm512_maskz_broadcast_i32x4(0xFFFF, group), position);
      _mm512_storeu_ps(out + d, selected(centroids, (__m512i)((Words)pairs >> shift)));
    }
  }
}

// Selects one of 256 16-bit numbers for each of 32 codes: one of 64 by the code's low 6 bits, in each quarter, and one
// of the quarters by its high 2 bits.
TORCH_GDN_INLINE __m512i centroid_halves(const __m512i (&table)[8], __m512i codes, __mmask32 bit_6, __mmask32 bit_7) {
  const __m512i low = _mm512_mask_blend_epi16(bit_6, _mm512_permutex2var_epi16(table[0], codes, table[1]),
                                              _mm512_permutex2var_epi16(table[2], codes, table[3]));
  const __m512i high = _mm512_mask_blend_epi16(bit_6, _mm512_permutex2var_epi16(table[4], codes, table[5]),
                                               _mm512_permutex2var_epi16(table[6], codes, table[7]));
  return _mm512_mask_blend_epi16(bit_7, low, high);
}

// Decodes codes of 8 bits. It selects the halves of centroids in registers, 32 codes at once. A gather takes 5 times as
// long.
TORCH_GDN_INLINE void dequantise_bytes(const Dequantise& codes) {
  __m512i low[8], high[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    low[i] = _mm512_load_si512(codes.table->low + 32 * i);
    high[i] = _mm512_load_si512(codes.table->high + 32 * i);
  }
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // undone by unpacking
  for (int64_t row = 0; row < codes.rows; ++row) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(codes.words + row * codes.stride);
    float* out = codes.out + row * codes.width;
    for (int64_t d = 0; d < codes.D; d += 32, bytes += 32) {
      const bool whole = d + 32 <= codes.D;
      const __m256i group = _mm256_maskz_loadu_epi8(whole ? 0xFFFFFFFF : 0xFFFF, bytes);
      const __m512i code = _mm512_cvtepu8_epi16(_mm256_permutevar8x32_epi32(group, order));
      const __mmask32 bit_6 = _mm512_test_epi16_mask(code, _mm512_set1_epi16(64));
      const __mmask32 bit_7 = _mm512_test_epi16_mask(code, _mm512_set1_epi16(128));
      const __m512i lower = centroid_halves(low, code, bit_6, bit_7), upper = centroid_halves(high, code, bit_6, bit_7);
      _mm512_storeu_si512(out + d, _mm512_unpacklo_epi16(lower, upper));
      if (whole) _mm512_storeu_si512(out + d + 16, _mm512_unpackhi_epi16(lower, upper));
    }
  }
}

void dequantise(const Dequantise& codes) {
  const bool is_trellis = codes.window > codes.bits;
  if (codes.bits == 2) return is_trellis ? dequantise_short<2, 6>(codes) : dequantise_short<2, 2>(codes);
  if (codes.bits == 3) return is_trellis ? dequantise_short<3, 6>(codes) : dequantise_short<3, 3>(codes);
  if (codes.bits == 4) return is_trellis ? dequantise_short<4, 6>(codes) : dequantise_short<4, 4>(codes);
  if (codes.bits == 5) return dequantise_short<5, 5>(codes);
  dequantise_bytes(codes);
}

#else

constexpr void (*dequantise)(const Dequantise&) = nullptr;

#endif

constexpr AuraKernels kAuraKernels = {dequantise, &dot_products,          &online_softmax, &add_weighted,
                                      &quantise,  &multiply_by_sylvester, kLanes,          &nearest_windows};
