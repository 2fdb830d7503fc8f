// The compiler intrinsics that Apple's own headers call. MLX's bf16_math.h also calls them, to give bfloat the
// functions of the library.
#pragma once

#define SIMULATOR_FUNCTION_1(name) \
  METAL_FUNC float __metal_##name(float x, bool fast) { return fast ? metal::fast::name(x) : metal::precise::name(x); }
#define SIMULATOR_FUNCTION_2(name)                                      \
  METAL_FUNC float __metal_##name(float x, float y, bool fast) {        \
    return fast ? metal::fast::name(x, y) : metal::precise::name(x, y); \
  }
#define SIMULATOR_FUNCTION_3(name) \
  METAL_FUNC float __metal_##name(float x, float y, float z, bool) { return metal::name(x, y, z); }
SIMULATOR_FUNCTION_1(acos)
SIMULATOR_FUNCTION_1(acosh)
SIMULATOR_FUNCTION_1(asin)
SIMULATOR_FUNCTION_1(asinh)
SIMULATOR_FUNCTION_1(atan)
SIMULATOR_FUNCTION_1(atanh)
SIMULATOR_FUNCTION_1(ceil)
SIMULATOR_FUNCTION_1(cos)
SIMULATOR_FUNCTION_1(cosh)
SIMULATOR_FUNCTION_1(cospi)
SIMULATOR_FUNCTION_1(exp)
SIMULATOR_FUNCTION_1(exp10)
SIMULATOR_FUNCTION_1(exp2)
SIMULATOR_FUNCTION_1(fabs)
SIMULATOR_FUNCTION_1(floor)
SIMULATOR_FUNCTION_1(fract)
SIMULATOR_FUNCTION_1(log)
SIMULATOR_FUNCTION_1(log10)
SIMULATOR_FUNCTION_1(log2)
SIMULATOR_FUNCTION_1(rint)
SIMULATOR_FUNCTION_1(round)
SIMULATOR_FUNCTION_1(rsqrt)
SIMULATOR_FUNCTION_1(sin)
SIMULATOR_FUNCTION_1(sinh)
SIMULATOR_FUNCTION_1(sinpi)
SIMULATOR_FUNCTION_1(sqrt)
SIMULATOR_FUNCTION_1(tan)
SIMULATOR_FUNCTION_1(tanh)
SIMULATOR_FUNCTION_1(tanpi)
SIMULATOR_FUNCTION_1(trunc)
SIMULATOR_FUNCTION_2(atan2)
SIMULATOR_FUNCTION_2(divide)
SIMULATOR_FUNCTION_2(fmax)
SIMULATOR_FUNCTION_2(fmin)
SIMULATOR_FUNCTION_2(fmod)
SIMULATOR_FUNCTION_2(pow)
SIMULATOR_FUNCTION_2(powr)
SIMULATOR_FUNCTION_3(fmax3)
SIMULATOR_FUNCTION_3(fmin3)
SIMULATOR_FUNCTION_3(fmedian3)
#undef SIMULATOR_FUNCTION_1
#undef SIMULATOR_FUNCTION_2
#undef SIMULATOR_FUNCTION_3

METAL_FUNC float __metal_fma(float x, float y, float z) { return metal::fma(x, y, z); }
METAL_FUNC float __metal_nextafter(float x, float y) { return metal::nextafter(x, y); }
METAL_FUNC float __metal_ldexp(float x, int k, bool) { return metal::ldexp(x, k); }
METAL_FUNC float __metal_frexp(float x, thread int* exponent) { return metal::frexp(x, *exponent); }

METAL_FUNC ushort __metal_get_simdgroup_size(ushort) { return 32; }
#define SIMULATOR_LANES_1(name)         \
  template <typename T>                 \
  METAL_FUNC T __metal_##name(T data) { \
    return metal::name(data);           \
  }
#define SIMULATOR_LANES_2(name)                           \
  template <typename T>                                   \
  METAL_FUNC T __metal_##name(T data, ushort parameter) { \
    return metal::name(data, parameter);                  \
  }
#define SIMULATOR_LANES_4(name)                                                 \
  template <typename T>                                                         \
  METAL_FUNC T __metal_##name(T data, T filling, ushort delta, ushort modulo) { \
    return metal::name(data, filling, delta, modulo);                           \
  }
SIMULATOR_LANES_1(simd_sum)
SIMULATOR_LANES_1(simd_product)
SIMULATOR_LANES_1(simd_min)
SIMULATOR_LANES_1(simd_max)
SIMULATOR_LANES_1(simd_prefix_inclusive_sum)
SIMULATOR_LANES_1(simd_prefix_exclusive_sum)
SIMULATOR_LANES_1(simd_prefix_inclusive_product)
SIMULATOR_LANES_1(simd_prefix_exclusive_product)
SIMULATOR_LANES_2(simd_broadcast)
SIMULATOR_LANES_2(simd_shuffle)
SIMULATOR_LANES_2(simd_shuffle_xor)
SIMULATOR_LANES_2(simd_shuffle_up)
SIMULATOR_LANES_2(simd_shuffle_down)
SIMULATOR_LANES_2(simd_shuffle_rotate_up)
SIMULATOR_LANES_2(simd_shuffle_rotate_down)
SIMULATOR_LANES_4(simd_shuffle_and_fill_up)
SIMULATOR_LANES_4(simd_shuffle_and_fill_down)
METAL_FUNC float __metal_simd_xor(float data) { return as_type<float>(metal::simd_xor(as_type<uint>(data))); }
#undef SIMULATOR_LANES_1
#undef SIMULATOR_LANES_2
#undef SIMULATOR_LANES_4
