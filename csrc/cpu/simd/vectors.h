// Vectors of kLanes floats for one ISA variant: conversions to and from the activation dtypes, arithmetic, and rows of
// vectors.

constexpr int kLanes = TORCH_GDN_LANES, kLaneBits = std::countr_zero(unsigned{kLanes});
constexpr int kRegisters = TORCH_GDN_REGISTERS;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef uint32_t WordsInMemory __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

TORCH_GDN_INLINE Floats all_lanes(float x) { return Floats{} + x; }

// GCC splits a conversion of 16 lanes into two.
#if TORCH_GDN_LANES == 16
TORCH_GDN_INLINE Words to_words(Halves x) { return (Words)_mm512_maskz_cvtepu16_epi32(0xFFFF, (__m256i)x); }
TORCH_GDN_INLINE Halves to_halves(Words x) { return (Halves)_mm512_maskz_cvtepi32_epi16(0xFFFF, (__m512i)x); }
#else
TORCH_GDN_INLINE Words to_words(Halves x) { return __builtin_convertvector(x, Words); }
TORCH_GDN_INLINE Halves to_halves(Words x) { return __builtin_convertvector(x, Halves); }
#endif

// The type of an element in memory, with its conversions to and from f32.
template <typename Element>
struct Memory;

template <>
struct Memory<float> {
  using Lanes = Floats;
  TORCH_GDN_INLINE static Floats upcast(Lanes x) { return x; }
  TORCH_GDN_INLINE static Lanes downcast(Floats x) { return x; }
  TORCH_GDN_INLINE static Floats rounded(Floats x) { return x; }
};

template <>
struct Memory<c10::BFloat16> {
  using Lanes = Halves;
  TORCH_GDN_INLINE static Floats upcast(Lanes x) { return (Floats)(to_words(x) << 16); }
  TORCH_GDN_INLINE static Lanes downcast(Floats x) { return to_halves(rounded_bits(x) >> 16); }
  TORCH_GDN_INLINE static Floats rounded(Floats x) { return (Floats)(rounded_bits(x) & 0xFFFF0000); }

 private:
  // Returns the number in the upper half of each word.
  TORCH_GDN_INLINE static Words rounded_bits(Floats x) {
    const Words bits = (Words)x;
    return x == x ? bits + 0x7FFF + ((bits >> 16) & 1) : Words{} + 0x7FC00000;
  }
};

// Converts halves without an instruction for it. If the exponent and digits of a half are moved into place, they are
// those of a float except for a factor of 2^112, even for denormals. The way back rounds a denormal by an addition that
// leaves its digits at the end of the sum. 2^-14 is the smallest normal half, and 65520 rounds to infinity.
template <>
struct Memory<c10::Half> {
  using Lanes = Halves;
#if TORCH_GDN_LANES == 16
  TORCH_GDN_INLINE static Floats upcast(Lanes x) { return (Floats)_mm512_maskz_cvtph_ps(0xFFFF, (__m256i)x); }
  TORCH_GDN_INLINE static Lanes downcast(Floats x) {
    return (Lanes)_mm512_maskz_cvtps_ph(0xFFFF, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
#elif TORCH_GDN_LANES == 8
  TORCH_GDN_INLINE static Floats upcast(Lanes x) { return (Floats)_mm256_cvtph_ps((__m128i)x); }
  TORCH_GDN_INLINE static Lanes downcast(Floats x) {
    return (Lanes)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
#else
  TORCH_GDN_INLINE static Floats upcast(Lanes x) {
    const Words half = to_words(x), magnitude = (half & 0x7FFF) << 13;
    const Words finite = (Words)((Floats)magnitude * 0x1p112f);
    return (Floats)(((Integers)magnitude >= 0x0F800000 ? magnitude | 0x7F800000 : finite) | (half & 0x8000) << 16);
  }
  TORCH_GDN_INLINE static Lanes downcast(Floats x) {
    const Words bits = (Words)x, magnitude = bits & 0x7FFFFFFF;
    const Words normal = (magnitude - (112u << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
    const Words denormal = (Words)((Floats)magnitude + 0.5f) - 0x3F000000;
    Words half = (Integers)magnitude < 0x38800000 ? denormal : normal;
    half = (Integers)magnitude >= 0x477FF000 ? Words{} + 0x7C00 : half;
    half = (Integers)magnitude > 0x7F800000 ? Words{} + 0x7E00 : half;
    return to_halves(half | (bits >> 16 & 0x8000));
  }
#endif
  TORCH_GDN_INLINE static Floats rounded(Floats x) { return upcast(downcast(x)); }
};

// Takes any address.
TORCH_GDN_INLINE Words load(const uint32_t* from) { return *reinterpret_cast<const WordsInMemory*>(from); }
TORCH_GDN_INLINE void store(uint32_t* to, Words x) { *reinterpret_cast<WordsInMemory*>(to) = x; }
// Fetches into the second-level cache. An address past the end does no harm.
TORCH_GDN_INLINE void prefetch(const void* x) { __builtin_prefetch(x, 0, 2); }

// Loads `count` elements into the first lanes, and zeros into the others.
template <typename Element>
TORCH_GDN_INLINE Floats load(const Element* from, int64_t count = kLanes) {
  typename Memory<Element>::Lanes lanes{};
  __builtin_memcpy(&lanes, from, count * sizeof(Element));
  return Memory<Element>::upcast(lanes);
}

template <typename Element>
TORCH_GDN_INLINE void store(Element* to, Floats x, int64_t count = kLanes) {
  const typename Memory<Element>::Lanes lanes = Memory<Element>::downcast(x);
  __builtin_memcpy(to, &lanes, count * sizeof(Element));
}

// Calls f(first, count) for kLanes of `count` elements at a time, then for the rest. If f is always inlined, the
// compiler knows the size of a whole vector in it.
template <typename F>
TORCH_GDN_INLINE void for_each_vector(int64_t count, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) f(i, kLanes);
  if (i < count) f(i, count - i);
}

// Both are for exp. The first clamps to the range of the series and passes NaN on. The second computes x 2^n, or 0 for
// n of -126 or less.
#if TORCH_GDN_LANES == 16
TORCH_GDN_INLINE Floats exponent_in_range(Floats x) {
  return (Floats)_mm512_maskz_min_ps(0xFFFF, _mm512_set1_ps(89.0f), (__m512)x);
}
TORCH_GDN_INLINE Floats times_power_of_two(Floats x, Floats n) {
  const __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)n, _mm512_set1_ps(-126.0f), _CMP_NLE_UQ);
  return (Floats)_mm512_maskz_scalef_ps(is_normal, (__m512)x, (__m512)n);
}
#else
TORCH_GDN_INLINE Floats exponent_in_range(Floats x) {
  const Floats below = x > 89.0f ? all_lanes(89.0f) : x;
  return below < -87.0f ? all_lanes(-87.0f) : below;
}
// Multiplies by 2^(n-1) and then doubles, because n may be 128.
TORCH_GDN_INLINE Floats times_power_of_two(Floats x, Floats n) {
  const Floats half = x * (Floats)(((Words)(n + 12582912.0f) + 126u) << 23);
  return half + half;
}
#endif

// Returns 1 / x within 2 ulp, and 0 for x of 2^126 or more. A division takes half as long as the whole exp of silu.
TORCH_GDN_INLINE Floats reciprocal(Floats x) {
#if TORCH_GDN_LANES == 16
  const Floats guess = (Floats)_mm512_maskz_rcp14_ps(0xFFFF, (__m512)x);
  return x >= 0x1p126f ? Floats{} : guess + guess * (1.0f - x * guess);
#else
  return 1.0f / x;
#endif
}

// Computes exp(x) = 2^n (1 + p), p = exp(r) - 1, |r| <= ln(2) / 2. ln(2) is in two parts, and the series of exp(r) goes
// up to r^7. The error is within 2 ulp. The result is 0 below -86.98 (lost values are almost denormal), infinity above
// 88.73, and NaN for NaN. kShort ends the series at r^4, which is accurate to 2^-14. It is for results that are rounded
// to bf16.
struct Exponential {
  Floats p, n;
};

template <bool kShort = false>
TORCH_GDN_INLINE Exponential exponential_parts(Floats x) {
  const Floats inside = exponent_in_range(x);
  const Floats shifted = inside * 1.44269504f + 12582912.0f;  // adds 1.5 * 2^23: the last bits are the rounded number
  const Floats n = shifted - 12582912.0f;
  const Floats r = (inside - n * 0.693145752f) - n * 1.42860677e-6f;
  Floats series = all_lanes(1.0f / 24.0f);
  if constexpr (!kShort) {
    series = r * (1.0f / 5040.0f) + 1.0f / 720.0f;
    series = series * r + 1.0f / 120.0f;
    series = series * r + 1.0f / 24.0f;
  }
  series = series * r + 1.0f / 6.0f;
  series = series * r + 0.5f;
  return {(series * r) * r + r, n};
}

template <bool kShort = false>
TORCH_GDN_INLINE Floats exponential(Floats x) {
  const auto [p, n] = exponential_parts<kShort>(x);
  return times_power_of_two(p + 1.0f, n);
}

// Returns y exp(x) with about one rounding, as y + p y.
TORCH_GDN_INLINE Floats times_exponential(Floats y, Floats x) {
  const auto [p, n] = exponential_parts(x);
  return times_power_of_two(y + p * y, n);
}

// Splits exp(x) into base + change. Near 0 they are 1 and exp(x) - 1, so that a state S keeps its digits in base S +
// (change S + update). Otherwise they are 0 and exp(x).
struct DecayParts {
  Floats base, change;
};

TORCH_GDN_INLINE DecayParts decay_parts(Floats x) {
  const auto [p, n] = exponential_parts(x);
  const auto is_weak = n == 0.0f;
  return {is_weak ? all_lanes(1.0f) : Floats{}, is_weak ? p : times_power_of_two(p + 1.0f, n)};
}

TORCH_GDN_INLINE Floats sigmoid(Floats x) { return reciprocal(1.0f + exponential(-x)); }

// The exp for a result that is rounded to Element.
template <typename Element>
TORCH_GDN_INLINE Floats silu(Floats x) {
#if TORCH_GDN_LANES == 16
  if constexpr (std::is_same_v<Element, c10::BFloat16>) {
    return x * (Floats)_mm512_maskz_rcp14_ps(0xFFFF, (__m512)(1.0f + exponential<true>(-x)));
  }
#endif
  return x * sigmoid(x);
}

// Computes log(1 + exp(x)). log(1 + y) for y from 0 to 1 is 2 atanh(s) with s = y / (2 + y). The series ends at s^15,
// with an error of 1e-9.
TORCH_GDN_INLINE Floats softplus(Floats x) {
  const Floats above = x > 0.0f ? x : Floats{}, y = exponential(x > 0.0f ? -x : x);
  const Floats s = y / (2.0f + y), square = s * s;
  Floats series = square * (1.0f / 15.0f) + 1.0f / 13.0f;
  series = series * square + 1.0f / 11.0f;
  series = series * square + 1.0f / 9.0f;
  series = series * square + 1.0f / 7.0f;
  series = series * square + 1.0f / 5.0f;
  series = series * square + 1.0f / 3.0f;
  return above + (series * square * (2.0f * s) + 2.0f * s);
}

// Interleaves lanes of a and b, from lane kFirst of each on.
template <int kFirst, int... kLane>
TORCH_GDN_INLINE Floats interleave(Floats a, Floats b, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(a, b, (kFirst + kLane / 2 + (kLane % 2) * int(kLanes))...);
}

// Moves the element at (vector, lane) to another place. Written as bits, the index of the new place is vector * kLanes
// + lane, rotated left by kBits. With log2(kLanes) bits, kLanes vectors are transposed.
template <int kBits, int kVectors>
TORCH_GDN_INLINE void transpose(Floats (&x)[kVectors]) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
#pragma GCC unroll 6
  for (int bit = 0; bit < kBits; ++bit) {
    Floats transposed[kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kVectors / 2; ++i) {
      transposed[2 * i] = interleave<0>(x[i], x[i + kVectors / 2], lanes);
      transposed[2 * i + 1] = interleave<kLanes / 2>(x[i], x[i + kVectors / 2], lanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) x[i] = transposed[i];
  }
}

// Splits 3 consecutive vectors into groups of three elements, and returns element kMember of each group.
// groups_of_three reverses it.
template <int kMember, int... kLane>
TORCH_GDN_INLINE Floats member_of_three(const Floats (&x)[3], std::integer_sequence<int, kLane...>) {
  constexpr int kTwo = 2 * kLanes;
  const Floats first = __builtin_shufflevector(x[0], x[1], (3 * kLane + kMember < kTwo ? 3 * kLane + kMember : 0)...);
  return __builtin_shufflevector(first, x[2],
                                 (3 * kLane + kMember < kTwo ? kLane : 3 * kLane + kMember - kTwo + int(kLanes))...);
}

template <int kVector, int... kLane>
TORCH_GDN_INLINE Floats groups_of_three(const Floats (&x)[3], std::integer_sequence<int, kLane...>) {
  constexpr int kFirst = kVector * kLanes;
  const Floats two = __builtin_shufflevector(x[0], x[1], ((kFirst + kLane) / 3 + (kFirst + kLane) % 3 % 2 * kLanes)...);
  return __builtin_shufflevector(two, x[2], ((kFirst + kLane) % 3 == 2 ? (kFirst + kLane) / 3 + kLanes : kLane)...);
}

// Transposes kLanes rows of kColumns elements into columns, and back.
template <int kColumns>
TORCH_GDN_INLINE void split_columns(Floats (&x)[kColumns]) {
  if constexpr (kColumns == 3) {
    constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
    const Floats first = member_of_three<0>(x, lanes), second = member_of_three<1>(x, lanes);
    x[2] = member_of_three<2>(x, lanes);
    x[0] = first;
    x[1] = second;
  } else {
    transpose<kLaneBits>(x);
  }
}

template <int kColumns>
TORCH_GDN_INLINE void join_columns(Floats (&x)[kColumns]) {
  if constexpr (kColumns == 3) {
    constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
    const Floats first = groups_of_three<0>(x, lanes), second = groups_of_three<1>(x, lanes);
    x[2] = groups_of_three<2>(x, lanes);
    x[0] = first;
    x[1] = second;
  } else {
    transpose<kColumns / 2>(x);  // 2 bits for 4 columns, 1 bit for 2 columns
  }
}

// Returns the sum of x[i] in lane i. Each step adds the halves of two vectors into one vector, whose lanes then
// alternate.
TORCH_GDN_INLINE Floats sums_of_lanes(Floats (&x)[kLanes]) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
#pragma GCC unroll 4
  for (int left = kLanes / 2; left > 0; left /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < left; ++i) {
      x[i] = interleave<0>(x[i], x[i + left], lanes) + interleave<kLanes / 2>(x[i], x[i + left], lanes);
    }
  }
  return x[0];
}

TORCH_GDN_INLINE float sum_of_lanes(Floats x) {
  float lanes[kLanes];
  store(lanes, x);
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

TORCH_GDN_INLINE Floats multiply_add(float a, Floats b, Floats sum) { return sum + a * b; }

// Calls f with a null pointer to the element type, for the three dtypes of activations.
template <typename F>
TORCH_GDN_INLINE void with_element(at::ScalarType dtype, const F& f) {
  if (dtype == at::kFloat) return f(static_cast<float*>(nullptr));
  if (dtype == at::kBFloat16) return f(static_cast<c10::BFloat16*>(nullptr));
  f(static_cast<c10::Half*>(nullptr));
}

TORCH_GDN_INLINE void upcast_row(const void* in, at::ScalarType dtype, int64_t count, float* out) {
  with_element(dtype, [&]<typename Element>(Element*) __attribute__((always_inline)) {
    const auto* from = static_cast<const Element*>(in);
    for_each_vector(count, [&](int64_t i, int64_t lanes)
                               __attribute__((always_inline)) { store(out + i, load(from + i, lanes), lanes); });
  });
}

TORCH_GDN_INLINE void downcast_row(const float* in, int64_t count, at::ScalarType dtype, void* out) {
  with_element(dtype, [&]<typename Element>(Element*) __attribute__((always_inline)) {
    auto* to = static_cast<Element*>(out);
    for_each_vector(count, [&](int64_t i, int64_t lanes)
                               __attribute__((always_inline)) { store(to + i, load(in + i, lanes), lanes); });
  });
}

// Sums blocks separately, so that the rounding error does not grow with count.
TORCH_GDN_INLINE float sum_of_squares(const float* x, int64_t count) {
  constexpr int64_t kBlock = 1024;
  double sum = 0;
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t end = first + kBlock < count ? first + kBlock : count;
    float block = 0;
#pragma omp simd reduction(+ : block)
    for (int64_t i = first; i < end; ++i) block += x[i] * x[i];
    sum += block;
  }
  return static_cast<float>(sum);
}

// Divides x by sqrt(sum x^2 + eps). Returns the factor that multiplied x.
TORCH_GDN_INLINE float normalise_row(float* x, int64_t count, float eps) {
  const float factor = 1.0f / __builtin_sqrtf(sum_of_squares(x, count) + eps);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) x[i] *= factor;
  return factor;
}
