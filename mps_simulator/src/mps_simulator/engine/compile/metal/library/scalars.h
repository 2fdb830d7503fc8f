// Scalar types: integers by their Metal names, and bfloat. clang itself has half and float.
#pragma once
#include "../../../kernel_abi.h"

#define METAL_FUNC inline __attribute__((always_inline, no_sanitize("object-size")))

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef ushort uint16_t;
typedef ulong uint64_t;
typedef long ptrdiff_t;
typedef ulong uintptr_t;
typedef long intptr_t;

namespace simulator {

template <typename T>
struct is_integer {
  static constexpr bool value = __is_integral(T) && !__is_same(T, bool);
};

template <bool condition, typename T = void>
struct when {};
template <typename T>
struct when<true, T> {
  typedef T type;
};

METAL_FUNC constexpr ushort round_to_bfloat(uint bits) {
  // Rounds to nearest, ties to even. A NaN becomes a quiet NaN, while rounding could turn it into infinity.
  return (bits & 0x7fffffffu) > 0x7f800000u ? static_cast<ushort>((bits >> 16) | 0x40u)
                                            : static_cast<ushort>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace simulator

// In Metal Shading Language 3.1, bfloat implicitly converts only to float, and nothing implicitly converts to bfloat.
// Each operation on two bfloats rounds to bfloat.
struct bfloat {
  __bf16 simulator_value;  // clang's own type, because only a variable of it is NaN until it is written

  bfloat() = default;
  template <typename T, typename = typename simulator::when<__is_arithmetic(T)>::type>
  METAL_FUNC explicit constexpr bfloat(T value)
      : simulator_value(__builtin_bit_cast(
            __bf16, simulator::round_to_bfloat(__builtin_bit_cast(uint, static_cast<float>(value))))) {}
  METAL_FUNC constexpr operator float() const {
    return __builtin_bit_cast(float, static_cast<uint>(__builtin_bit_cast(ushort, simulator_value)) << 16);
  }
  METAL_FUNC constexpr bfloat operator-() const { return bfloat(-static_cast<float>(*this)); }
  METAL_FUNC constexpr bfloat operator+() const { return *this; }
};

#define SIMULATOR_BFLOAT_OPERATOR(op)                                                               \
  METAL_FUNC constexpr bfloat operator op(bfloat a, bfloat b) {                                     \
    return bfloat(static_cast<float>(a) op static_cast<float>(b));                                  \
  }                                                                                                 \
  template <typename T, typename = typename simulator::when<simulator::is_integer<T>::value>::type> \
  METAL_FUNC constexpr bfloat operator op(bfloat a, T b) {                                          \
    return a op bfloat(b);                                                                          \
  }                                                                                                 \
  template <typename T, typename = typename simulator::when<simulator::is_integer<T>::value>::type> \
  METAL_FUNC constexpr bfloat operator op(T a, bfloat b) {                                          \
    return bfloat(a) op b;                                                                          \
  }                                                                                                 \
  METAL_FUNC constexpr bfloat& operator op##=(bfloat & a, bfloat b) { return a = a op b; }
SIMULATOR_BFLOAT_OPERATOR(+)
SIMULATOR_BFLOAT_OPERATOR(-)
SIMULATOR_BFLOAT_OPERATOR(*)
SIMULATOR_BFLOAT_OPERATOR(/)
#undef SIMULATOR_BFLOAT_OPERATOR
