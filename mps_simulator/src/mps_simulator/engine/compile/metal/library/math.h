// <metal_math>, <metal_common>, <metal_relational> and <metal_geometric>.
//
// Error bounds are those of the Metal Shading Language Specification (section "Relative Error as ULPs"). metal::precise
// follows the table of single-precision functions, and metal::fast the table for fast math. If the specification gives
// a bound as an absolute error or a formula, we use its value in ULPs at a typical argument. Functions are computed in
// double and rounded once, so that the perturbed result keeps the bound too. The functions of half are computed in
// float and rounded again.
#pragma once

namespace simulator {

// Computes in double and rounds once. The result is correctly rounded except for ties, which no float argument has.
METAL_FUNC float reciprocal_root(float x) {
  return static_cast<float>(static_cast<double>(1) / __builtin_sqrt(static_cast<double>(x)));
}

// Takes the remainder of a division by 2, which is exact. sin(pi x) and cos(pi x) of large arguments then keep their
// digits.
METAL_FUNC double half_turns(float x) {
  return static_cast<double>(3.14159265358979323846L) * static_cast<double>(x - 2.0f * __builtin_rintf(0.5f * x));
}
METAL_FUNC float sine_pi(float x) { return static_cast<float>(__builtin_sin(half_turns(x))); }
METAL_FUNC float cosine_pi(float x) { return static_cast<float>(__builtin_cos(half_turns(x))); }
METAL_FUNC float fraction(float x) { return __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f); }
// fmin and fmax ignore a NaN. A variable that was never written has all bits set, and so do half and bfloat variables.
METAL_FUNC float written(float x) {
  if (__builtin_bit_cast(uint, x) >= 0xffff0000u) simulator_unwritten();
  return x;
}
METAL_FUNC float least_of(float x, float y) { return __builtin_fminf(written(x), written(y)); }
METAL_FUNC float largest_of(float x, float y) { return __builtin_fmaxf(written(x), written(y)); }
METAL_FUNC float exponential_bound(float x) { return 3.0f + __builtin_floorf(__builtin_fabsf(2.0f * x)); }

}  // namespace simulator

namespace metal {

#ifdef __FAST_MATH__
#define SIMULATOR_DEFAULT fast
#else
#define SIMULATOR_DEFAULT precise
#endif

#define SIMULATOR_EACH(name)                         \
  struct simulator_each_##name {                     \
    template <int I, typename... V>                  \
    METAL_FUNC static constexpr auto apply(V... v) { \
      return name(v.template get<I>()...);           \
    }                                                \
  };
#define SIMULATOR_VECTOR_1(name)                                                                   \
  SIMULATOR_EACH(name)                                                                             \
  template <typename T, int N>                                                                     \
  METAL_FUNC auto name(vec<T, N> x) {                                                              \
    typedef decltype(name(T())) Result;                                                            \
    return simulator::each<Result, simulator_each_##name, N>(simulator::make_indices<N>(), {}, x); \
  }
// The second and later arguments may be scalars. They convert to the vector type.
#define SIMULATOR_VECTOR_2(name)                                                                       \
  SIMULATOR_EACH(name)                                                                                 \
  template <typename T, int N>                                                                         \
  METAL_FUNC auto name(vec<T, N> x, typename type_identity<vec<T, N>>::type y) {                       \
    typedef decltype(name(T(), T())) Result;                                                           \
    return simulator::each<Result, simulator_each_##name, N>(simulator::make_indices<N>(), {}, x, y);  \
  }                                                                                                    \
  template <typename S, typename T, int N, typename = enable_if_t<simulator::is_operand<S, T>::value>> \
  METAL_FUNC auto name(S x, vec<T, N> y) {                                                             \
    return name(vec<T, N>(static_cast<T>(x)), y);                                                      \
  }
#define SIMULATOR_VECTOR_3(name)                                                                         \
  SIMULATOR_EACH(name)                                                                                   \
  template <typename T, int N>                                                                           \
  METAL_FUNC auto name(vec<T, N> x, typename type_identity<vec<T, N>>::type y,                           \
                       typename type_identity<vec<T, N>>::type z) {                                      \
    typedef decltype(name(T(), T(), T())) Result;                                                        \
    return simulator::each<Result, simulator_each_##name, N>(simulator::make_indices<N>(), {}, x, y, z); \
  }

#define SIMULATOR_ROUNDED(function, ...) static_cast<float>(__builtin_##function(__VA_ARGS__))
#define SIMULATOR_UNARY(name, expression, precise_ulps, fast_ulps)                                 \
  namespace precise {                                                                              \
  METAL_FUNC float name(float x) { return simulator_perturb(expression, precise_ulps - 0.5f); }    \
  SIMULATOR_VECTOR_1(name)                                                                         \
  }                                                                                                \
  namespace fast {                                                                                 \
  METAL_FUNC float name(float x) { return simulator_perturb(expression, fast_ulps - 0.5f); }       \
  SIMULATOR_VECTOR_1(name)                                                                         \
  }                                                                                                \
  METAL_FUNC float name(float x) { return SIMULATOR_DEFAULT::name(x); }                            \
  METAL_FUNC half name(half x) { return static_cast<half>(precise::name(static_cast<float>(x))); } \
  SIMULATOR_VECTOR_1(name)
#define SIMULATOR_BINARY(name, expression, precise_ulps, fast_ulps)                                      \
  namespace precise {                                                                                    \
  METAL_FUNC float name(float x, float y) { return simulator_perturb(expression, precise_ulps - 0.5f); } \
  SIMULATOR_VECTOR_2(name)                                                                               \
  }                                                                                                      \
  namespace fast {                                                                                       \
  METAL_FUNC float name(float x, float y) { return simulator_perturb(expression, fast_ulps - 0.5f); }    \
  SIMULATOR_VECTOR_2(name)                                                                               \
  }                                                                                                      \
  METAL_FUNC float name(float x, float y) { return SIMULATOR_DEFAULT::name(x, y); }                      \
  METAL_FUNC half name(half x, half y) {                                                                 \
    return static_cast<half>(precise::name(static_cast<float>(x), static_cast<float>(y)));               \
  }                                                                                                      \
  SIMULATOR_VECTOR_2(name)
// These functions are exact in both variants.
#define SIMULATOR_EXACT_1(name, expression)                                                      \
  METAL_FUNC float name(float x) { return expression; }                                          \
  METAL_FUNC half name(half x) { return static_cast<half>(metal::name(static_cast<float>(x))); } \
  SIMULATOR_VECTOR_1(name)                                                                       \
  namespace precise {                                                                            \
  using metal::name;                                                                             \
  }                                                                                              \
  namespace fast {                                                                               \
  using metal::name;                                                                             \
  }
#define SIMULATOR_EXACT_2(name, expression)                                              \
  METAL_FUNC float name(float x, float y) { return expression; }                         \
  METAL_FUNC half name(half x, half y) {                                                 \
    return static_cast<half>(metal::name(static_cast<float>(x), static_cast<float>(y))); \
  }                                                                                      \
  SIMULATOR_VECTOR_2(name)                                                               \
  namespace precise {                                                                    \
  using metal::name;                                                                     \
  }                                                                                      \
  namespace fast {                                                                       \
  using metal::name;                                                                     \
  }

SIMULATOR_UNARY(acos, SIMULATOR_ROUNDED(acos, x), 4, 5)
SIMULATOR_UNARY(acosh, SIMULATOR_ROUNDED(acosh, x), 4, 5)
SIMULATOR_UNARY(asin, SIMULATOR_ROUNDED(asin, x), 4, 5)
SIMULATOR_UNARY(asinh, SIMULATOR_ROUNDED(asinh, x), 4, 5)
SIMULATOR_UNARY(atan, SIMULATOR_ROUNDED(atan, x), 5, 5)
SIMULATOR_UNARY(atanh, SIMULATOR_ROUNDED(atanh, x), 5, 5)
SIMULATOR_UNARY(cos, SIMULATOR_ROUNDED(cos, x), 4, 16)
SIMULATOR_UNARY(cosh, SIMULATOR_ROUNDED(cosh, x), 4, simulator::exponential_bound(x))
SIMULATOR_UNARY(cospi, simulator::cosine_pi(x), 4, 16)
SIMULATOR_UNARY(exp, SIMULATOR_ROUNDED(exp, x), 4, simulator::exponential_bound(x))
SIMULATOR_UNARY(exp2, SIMULATOR_ROUNDED(exp2, x), 4, simulator::exponential_bound(x))
SIMULATOR_UNARY(exp10, SIMULATOR_ROUNDED(exp10, x), 4, simulator::exponential_bound(x))
SIMULATOR_UNARY(log, SIMULATOR_ROUNDED(log, x), 4, 4)
SIMULATOR_UNARY(log2, SIMULATOR_ROUNDED(log2, x), 4, 4)
SIMULATOR_UNARY(log10, SIMULATOR_ROUNDED(log10, x), 4, 4)
SIMULATOR_UNARY(rsqrt, simulator::reciprocal_root(x), 0, 2)
SIMULATOR_UNARY(sin, SIMULATOR_ROUNDED(sin, x), 4, 16)
SIMULATOR_UNARY(sinh, SIMULATOR_ROUNDED(sinh, x), 4, simulator::exponential_bound(x))
SIMULATOR_UNARY(sinpi, simulator::sine_pi(x), 4, 16)
SIMULATOR_UNARY(sqrt, __builtin_sqrtf(x), 0, 3)
SIMULATOR_UNARY(tan, SIMULATOR_ROUNDED(tan, x), 6, 16)
SIMULATOR_UNARY(tanh, SIMULATOR_ROUNDED(tanh, x), 5, 5)
SIMULATOR_UNARY(tanpi, simulator::sine_pi(x) / simulator::cosine_pi(x), 6, 16)
SIMULATOR_BINARY(atan2, SIMULATOR_ROUNDED(atan2, x, y), 6, 6)
SIMULATOR_BINARY(pow, SIMULATOR_ROUNDED(pow, x, y), 16, 16)
SIMULATOR_BINARY(powr, SIMULATOR_ROUNDED(pow, x, y), 16, 16)
SIMULATOR_BINARY(divide, x / y, 0, 2.5f)

SIMULATOR_EXACT_1(ceil, __builtin_ceilf(x))
SIMULATOR_EXACT_1(fabs, __builtin_fabsf(x))
SIMULATOR_EXACT_1(floor, __builtin_floorf(x))
SIMULATOR_EXACT_1(fract, simulator::fraction(x))
SIMULATOR_EXACT_1(rint, __builtin_rintf(x))
SIMULATOR_EXACT_1(round, __builtin_roundf(x))
SIMULATOR_EXACT_1(trunc, __builtin_truncf(x))
SIMULATOR_EXACT_1(saturate, simulator::least_of(simulator::largest_of(x, 0.0f), 1.0f))
SIMULATOR_EXACT_1(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? x : 0.0f)
SIMULATOR_EXACT_2(copysign, __builtin_copysignf(x, y))
SIMULATOR_EXACT_2(fdim, __builtin_fdimf(x, y))
SIMULATOR_EXACT_2(fmax, simulator::largest_of(x, y))
SIMULATOR_EXACT_2(fmin, simulator::least_of(x, y))
SIMULATOR_EXACT_2(fmod, __builtin_fmodf(x, y))
SIMULATOR_EXACT_2(step, y < x ? 0.0f : 1.0f)
METAL_FUNC float nextafter(float x, float y) { return __builtin_nextafterf(x, y); }

// min, max, abs and clamp also exist for integers (integer.h).
#define SIMULATOR_FLOATING(T)                                                                           \
  METAL_FUNC T abs(T x) { return fabs(x); }                                                             \
  METAL_FUNC T max(T x, T y) { return fmax(x, y); }                                                     \
  METAL_FUNC T min(T x, T y) { return fmin(x, y); }                                                     \
  METAL_FUNC T clamp(T x, T low, T high) { return fmin(fmax(x, low), high); }                           \
  METAL_FUNC T fmax3(T x, T y, T z) { return fmax(fmax(x, y), z); }                                     \
  METAL_FUNC T fmin3(T x, T y, T z) { return fmin(fmin(x, y), z); }                                     \
  METAL_FUNC T fmedian3(T x, T y, T z) { return fmax(fmin(x, y), fmin(fmax(x, y), z)); }                \
  METAL_FUNC T max3(T x, T y, T z) { return fmax3(x, y, z); }                                           \
  METAL_FUNC T min3(T x, T y, T z) { return fmin3(x, y, z); }                                           \
  METAL_FUNC T median3(T x, T y, T z) { return fmedian3(x, y, z); }                                     \
  METAL_FUNC T mix(T x, T y, T a) { return x + (y - x) * a; }                                           \
  METAL_FUNC T smoothstep(T low, T high, T x) {                                                         \
    T t = clamp((x - low) / (high - low), T(0), T(1));                                                  \
    return t * t * (T(3) - T(2) * t);                                                                   \
  }                                                                                                     \
  METAL_FUNC bool isnan(T x) { return __builtin_isnan(static_cast<float>(x)); }                         \
  METAL_FUNC bool isinf(T x) { return __builtin_isinf(static_cast<float>(x)); }                         \
  METAL_FUNC bool isfinite(T x) { return __builtin_isfinite(static_cast<float>(x)); }                   \
  METAL_FUNC bool isnormal(T x) { return isfinite(x) && fabs(x) >= numeric_limits<T>::min(); }          \
  METAL_FUNC bool signbit(T x) { return __builtin_signbitf(static_cast<float>(x)); }                    \
  METAL_FUNC bool isunordered(T x, T y) {                                                               \
    return __builtin_isunordered(static_cast<float>(x), static_cast<float>(y));                         \
  }                                                                                                     \
  METAL_FUNC bool isordered(T x, T y) { return !isunordered(x, y); }                                    \
  METAL_FUNC T ldexp(T x, int k) { return static_cast<T>(__builtin_ldexpf(static_cast<float>(x), k)); } \
  METAL_FUNC int ilogb(T x) { return __builtin_ilogbf(static_cast<float>(x)); }                         \
  METAL_FUNC T modf(T x, thread T& whole) {                                                             \
    whole = trunc(x);                                                                                   \
    return isinf(x) ? copysign(T(0), x) : copysign(x - whole, x);                                       \
  }                                                                                                     \
  METAL_FUNC T frexp(T x, thread int& exponent) {                                                       \
    int result = 0;                                                                                     \
    float fraction = __builtin_frexpf(static_cast<float>(x), reinterpret_cast<int*>(&result));          \
    exponent = result;                                                                                  \
    return static_cast<T>(fraction);                                                                    \
  }
SIMULATOR_FLOATING(float)
SIMULATOR_FLOATING(half)
#undef SIMULATOR_FLOATING

// The Metal library converts bfloats to float to compare them.
METAL_FUNC bool isnan(bfloat x) { return isnan(static_cast<float>(x)); }
METAL_FUNC bool isinf(bfloat x) { return isinf(static_cast<float>(x)); }
METAL_FUNC bool isfinite(bfloat x) { return isfinite(static_cast<float>(x)); }

METAL_FUNC float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
// The product of two halves is exact in double, and so is its sum with a third, so the result is rounded once.
METAL_FUNC half fma(half x, half y, half z) {
  return static_cast<half>(static_cast<double>(x) * static_cast<double>(y) + static_cast<double>(z));
}

#define SIMULATOR_SINCOS(T)                    \
  METAL_FUNC T sincos(T x, thread T& cosine) { \
    cosine = cos(x);                           \
    return sin(x);                             \
  }
SIMULATOR_SINCOS(float)
SIMULATOR_SINCOS(half)

namespace precise {
SIMULATOR_SINCOS(float)
using metal::abs;
using metal::clamp;
using metal::fma;
using metal::max;
using metal::min;
}  // namespace precise
namespace fast {
SIMULATOR_SINCOS(float)
using metal::abs;
using metal::clamp;
using metal::fma;
using metal::max;
using metal::min;
}  // namespace fast

SIMULATOR_VECTOR_1(isnan)
SIMULATOR_VECTOR_1(isinf)
SIMULATOR_VECTOR_1(isfinite)
SIMULATOR_VECTOR_1(isnormal)
SIMULATOR_VECTOR_1(signbit)
SIMULATOR_VECTOR_2(isordered)
SIMULATOR_VECTOR_2(isunordered)
SIMULATOR_VECTOR_3(fma)
SIMULATOR_VECTOR_3(fmax3)
SIMULATOR_VECTOR_3(fmin3)
SIMULATOR_VECTOR_3(fmedian3)
SIMULATOR_VECTOR_3(mix)
SIMULATOR_VECTOR_3(smoothstep)

template <int N>
METAL_FUNC bool any(vec<bool, N> x) {
  bool result = false;
  for (int i = 0; i < N; ++i) result = result || x[i];
  return result;
}
template <int N>
METAL_FUNC bool all(vec<bool, N> x) {
  bool result = true;
  for (int i = 0; i < N; ++i) result = result && x[i];
  return result;
}
METAL_FUNC bool any(bool x) { return x; }
METAL_FUNC bool all(bool x) { return x; }

template <typename T, typename = enable_if_t<simulator::is_number<T>::value>>
METAL_FUNC constexpr T select(T x, T y, bool condition) {
  return condition ? y : x;
}
template <typename T, int N>
METAL_FUNC vec<T, N> select(vec<T, N> x, typename type_identity<vec<T, N>>::type y, vec<bool, N> condition) {
  for (int i = 0; i < N; ++i) x[i] = condition[i] ? y[i] : x[i];
  return x;
}

template <typename T, int N>
METAL_FUNC T dot(vec<T, N> x, vec<T, N> y) {
  T sum = x[0] * y[0];
  for (int i = 1; i < N; ++i) sum = sum + x[i] * y[i];
  return sum;
}
template <typename T, int N>
METAL_FUNC T length_squared(vec<T, N> x) {
  return dot(x, x);
}
template <typename T, int N>
METAL_FUNC T length(vec<T, N> x) {
  return sqrt(dot(x, x));
}
template <typename T, int N>
METAL_FUNC T distance(vec<T, N> x, vec<T, N> y) {
  return length(x - y);
}
template <typename T, int N>
METAL_FUNC T distance_squared(vec<T, N> x, vec<T, N> y) {
  return length_squared(x - y);
}
template <typename T, int N>
METAL_FUNC vec<T, N> normalize(vec<T, N> x) {
  return x * rsqrt(dot(x, x));
}
template <typename T>
METAL_FUNC vec<T, 3> cross(vec<T, 3> a, vec<T, 3> b) {
  return {a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x};
}

#undef SIMULATOR_ROUNDED
#undef SIMULATOR_UNARY
#undef SIMULATOR_BINARY
#undef SIMULATOR_SINCOS
#undef SIMULATOR_EXACT_1
#undef SIMULATOR_EXACT_2

}  // namespace metal
