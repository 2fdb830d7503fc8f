// <metal_integer>, and abs, min, max and clamp for integers and vectors.
#pragma once

namespace simulator {

template <typename T>
struct double_width;
#define SIMULATOR_DOUBLE_WIDTH(T, U) \
  template <>                        \
  struct double_width<T> {           \
    typedef U type;                  \
  };
SIMULATOR_DOUBLE_WIDTH(char, short)
SIMULATOR_DOUBLE_WIDTH(signed char, short)
SIMULATOR_DOUBLE_WIDTH(uchar, ushort)
SIMULATOR_DOUBLE_WIDTH(short, int)
SIMULATOR_DOUBLE_WIDTH(ushort, uint)
SIMULATOR_DOUBLE_WIDTH(int, long)
SIMULATOR_DOUBLE_WIDTH(uint, ulong)
SIMULATOR_DOUBLE_WIDTH(long, __int128)
SIMULATOR_DOUBLE_WIDTH(ulong, unsigned __int128)
#undef SIMULATOR_DOUBLE_WIDTH

template <typename T>
METAL_FUNC T saturated(typename double_width<T>::type wide) {
  typedef metal::numeric_limits<T> limits;
  if (wide > limits::max()) return limits::max();
  if (wide < limits::min()) return limits::min();
  return static_cast<T>(wide);
}

}  // namespace simulator

namespace metal {

#define SIMULATOR_INTEGER(T, U)                                                                                        \
  METAL_FUNC constexpr T max(T x, T y) { return x < y ? y : x; }                                                       \
  METAL_FUNC constexpr T min(T x, T y) { return y < x ? y : x; }                                                       \
  METAL_FUNC constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); }                                  \
  METAL_FUNC constexpr T max3(T x, T y, T z) { return max(max(x, y), z); }                                             \
  METAL_FUNC constexpr T min3(T x, T y, T z) { return min(min(x, y), z); }                                             \
  METAL_FUNC constexpr T median3(T x, T y, T z) { return max(min(x, y), min(max(x, y), z)); }                          \
  METAL_FUNC constexpr T abs(T x) { return x < T(0) ? static_cast<T>(-x) : x; }                                        \
  METAL_FUNC constexpr U absdiff(T x, T y) {                                                                           \
    return static_cast<U>(x < y ? static_cast<U>(y) - static_cast<U>(x) : static_cast<U>(x) - static_cast<U>(y));      \
  }                                                                                                                    \
  METAL_FUNC T addsat(T x, T y) {                                                                                      \
    typedef simulator::double_width<T>::type Wide;                                                                     \
    return simulator::saturated<T>(static_cast<Wide>(x) + static_cast<Wide>(y));                                       \
  }                                                                                                                    \
  METAL_FUNC T subsat(T x, T y) { return y > x && T(-1) > T(0) ? T(0) : SIMULATOR_SUBTRACT(T, x, y); }                 \
  METAL_FUNC T hadd(T x, T y) {                                                                                        \
    typedef simulator::double_width<T>::type Wide;                                                                     \
    return static_cast<T>((static_cast<Wide>(x) + static_cast<Wide>(y)) >> 1);                                         \
  }                                                                                                                    \
  METAL_FUNC T rhadd(T x, T y) {                                                                                       \
    typedef simulator::double_width<T>::type Wide;                                                                     \
    return static_cast<T>((static_cast<Wide>(x) + static_cast<Wide>(y) + 1) >> 1);                                     \
  }                                                                                                                    \
  METAL_FUNC T mulhi(T x, T y) {                                                                                       \
    typedef simulator::double_width<T>::type Wide;                                                                     \
    return static_cast<T>((static_cast<Wide>(x) * static_cast<Wide>(y)) >> (sizeof(T) * 8));                           \
  }                                                                                                                    \
  METAL_FUNC T madhi(T x, T y, T z) { return static_cast<T>(mulhi(x, y) + z); }                                        \
  METAL_FUNC T clz(T x) {                                                                                              \
    return static_cast<T>(x == 0 ? sizeof(T) * 8 : __builtin_clzl(static_cast<U>(x)) - (64 - sizeof(T) * 8));          \
  }                                                                                                                    \
  METAL_FUNC T ctz(T x) { return static_cast<T>(x == 0 ? sizeof(T) * 8 : __builtin_ctzl(static_cast<U>(x))); }         \
  METAL_FUNC T popcount(T x) { return static_cast<T>(__builtin_popcountl(static_cast<U>(x))); }                        \
  METAL_FUNC T reverse_bits(T x) {                                                                                     \
    return static_cast<T>(__builtin_bitreverse64(static_cast<U>(x)) >> (64 - sizeof(T) * 8));                          \
  }                                                                                                                    \
  METAL_FUNC T rotate(T x, T count) {                                                                                  \
    uint width = sizeof(T) * 8, left = static_cast<uint>(count) & (width - 1);                                         \
    U bits = static_cast<U>(x);                                                                                        \
    return static_cast<T>(left == 0 ? bits : static_cast<U>(bits << left) | static_cast<U>(bits >> (width - left)));   \
  }                                                                                                                    \
  METAL_FUNC T extract_bits(T x, uint offset, uint count) {                                                            \
    uint width = sizeof(T) * 8;                                                                                        \
    if (count == 0) return 0;                                                                                          \
    return static_cast<T>(static_cast<T>(static_cast<U>(x) << (width - offset - count)) >> (width - count));           \
  }                                                                                                                    \
  METAL_FUNC T insert_bits(T base, T insert, uint offset, uint count) {                                                \
    U mask = static_cast<U>((count >= sizeof(T) * 8 ? ~0ul : (1ul << count) - 1) << offset);                           \
    return static_cast<T>((static_cast<U>(base) & ~mask) | (static_cast<U>(static_cast<U>(insert) << offset) & mask)); \
  }
#define SIMULATOR_SUBTRACT(T, x, y)                                          \
  simulator::saturated<T>(static_cast<simulator::double_width<T>::type>(x) - \
                          static_cast<simulator::double_width<T>::type>(y))
SIMULATOR_INTEGER(char, uchar)
SIMULATOR_INTEGER(int8_t, uchar)
SIMULATOR_INTEGER(uchar, uchar)
SIMULATOR_INTEGER(short, ushort)
SIMULATOR_INTEGER(ushort, ushort)
SIMULATOR_INTEGER(int, uint)
SIMULATOR_INTEGER(uint, uint)
SIMULATOR_INTEGER(long, ulong)
SIMULATOR_INTEGER(ulong, ulong)
#undef SIMULATOR_SUBTRACT
#undef SIMULATOR_INTEGER

METAL_FUNC int mul24(int x, int y) { return x * y; }
METAL_FUNC uint mul24(uint x, uint y) { return x * y; }
METAL_FUNC int mad24(int x, int y, int z) { return x * y + z; }
METAL_FUNC uint mad24(uint x, uint y, uint z) { return x * y + z; }

SIMULATOR_VECTOR_1(abs)
SIMULATOR_VECTOR_2(max)
SIMULATOR_VECTOR_2(min)
SIMULATOR_VECTOR_3(clamp)
SIMULATOR_VECTOR_3(max3)
SIMULATOR_VECTOR_3(min3)
SIMULATOR_VECTOR_3(median3)
SIMULATOR_VECTOR_2(absdiff)
SIMULATOR_VECTOR_2(addsat)
SIMULATOR_VECTOR_2(subsat)
SIMULATOR_VECTOR_2(hadd)
SIMULATOR_VECTOR_2(rhadd)
SIMULATOR_VECTOR_2(mulhi)
SIMULATOR_VECTOR_1(clz)
SIMULATOR_VECTOR_1(ctz)
SIMULATOR_VECTOR_1(popcount)
SIMULATOR_VECTOR_1(reverse_bits)
SIMULATOR_VECTOR_2(rotate)

#undef SIMULATOR_EACH
#undef SIMULATOR_VECTOR_1
#undef SIMULATOR_VECTOR_2
#undef SIMULATOR_VECTOR_3

}  // namespace metal
