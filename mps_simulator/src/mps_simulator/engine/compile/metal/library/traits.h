// <metal_type_traits> and <metal_limits>.
#pragma once

namespace metal {

template <typename T, T v>
struct integral_constant {
  static constexpr T value = v;
  typedef T value_type;
  constexpr operator T() const { return v; }
};
template <bool v>
using bool_constant = integral_constant<bool, v>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <bool condition, typename T = void>
using enable_if = simulator::when<condition, T>;
template <bool condition, typename T = void>
using enable_if_t = typename enable_if<condition, T>::type;

template <bool condition, typename T, typename U>
struct conditional {
  typedef U type;
};
template <typename T, typename U>
struct conditional<true, T, U> {
  typedef T type;
};
template <bool condition, typename T, typename U>
using conditional_t = typename conditional<condition, T, U>::type;

template <typename T>
struct type_identity {
  typedef T type;
};

#define SIMULATOR_TRANSFORM(name, builtin) \
  template <typename T>                    \
  struct name {                            \
    typedef builtin(T) type;               \
  };                                       \
  template <typename T>                    \
  using name##_t = typename name<T>::type;
SIMULATOR_TRANSFORM(remove_const, __remove_const)
SIMULATOR_TRANSFORM(remove_volatile, __remove_volatile)
SIMULATOR_TRANSFORM(remove_cv, __remove_cv)
SIMULATOR_TRANSFORM(remove_reference, __remove_reference_t)
SIMULATOR_TRANSFORM(remove_pointer, __remove_pointer)
SIMULATOR_TRANSFORM(remove_extent, __remove_extent)
SIMULATOR_TRANSFORM(decay, __decay)
SIMULATOR_TRANSFORM(underlying_type, __underlying_type)
SIMULATOR_TRANSFORM(make_signed, __make_signed)
SIMULATOR_TRANSFORM(make_unsigned, __make_unsigned)
#undef SIMULATOR_TRANSFORM

template <typename T>
thread typename remove_reference<T>::type&& declval();

template <typename T>
struct remove_addrspace {
  typedef T type;
};
#define SIMULATOR_REMOVE(space)      \
  template <typename T>              \
  struct remove_addrspace<space T> { \
    typedef T type;                  \
  };
SIMULATOR_REMOVE(thread)
SIMULATOR_REMOVE(device)
SIMULATOR_REMOVE(threadgroup)
SIMULATOR_REMOVE(__global)
#undef SIMULATOR_REMOVE
template <typename T>
using remove_addrspace_t = typename remove_addrspace<T>::type;

template <typename... B>
using _disjunction = bool_constant<(B::value || ...)>;
template <typename... B>
using _conjunction = bool_constant<(B::value && ...)>;

#define SIMULATOR_TRAIT(name, ...)               \
  template <typename T>                          \
  struct name : bool_constant<(__VA_ARGS__)> {}; \
  template <typename T>                          \
  static constexpr bool name##_v = name<T>::value;
SIMULATOR_TRAIT(is_void, __is_void(T))
SIMULATOR_TRAIT(is_integral, __is_integral(T))
SIMULATOR_TRAIT(is_floating_point, __is_floating_point(T) || __is_same(__remove_cv(T), bfloat))
SIMULATOR_TRAIT(is_arithmetic, is_integral<T>::value || is_floating_point<T>::value)
SIMULATOR_TRAIT(is_scalar, __is_scalar(T) || __is_same(__remove_cv(T), bfloat))
SIMULATOR_TRAIT(is_signed, __is_signed(T) || is_floating_point<T>::value)
SIMULATOR_TRAIT(is_unsigned, __is_unsigned(T))
SIMULATOR_TRAIT(is_const, __is_const(T))
SIMULATOR_TRAIT(is_pointer, __is_pointer(T))
SIMULATOR_TRAIT(is_reference, __is_reference(T))
SIMULATOR_TRAIT(is_array, __is_array(T))
SIMULATOR_TRAIT(is_enum, __is_enum(T))
SIMULATOR_TRAIT(is_class, __is_class(T))
SIMULATOR_TRAIT(is_union, __is_union(T))
SIMULATOR_TRAIT(is_trivially_copyable, __is_trivially_copyable(T))
#undef SIMULATOR_TRAIT

#define SIMULATOR_TRAIT(name, ...)               \
  template <typename T, typename U>              \
  struct name : bool_constant<(__VA_ARGS__)> {}; \
  template <typename T, typename U>              \
  static constexpr bool name##_v = name<T, U>::value;
SIMULATOR_TRAIT(is_same, __is_same(T, U))
SIMULATOR_TRAIT(is_convertible, __is_convertible(T, U))
SIMULATOR_TRAIT(is_base_of, __is_base_of(T, U))
#undef SIMULATOR_TRAIT

template <typename T>
struct numeric_limits {
  static constexpr bool is_specialized = false;
};

namespace simulator_limits {
template <typename T>
struct of_integer {
  static constexpr bool is_specialized = true, is_integer = true, is_signed = __is_signed(T), is_exact = true;
  static constexpr bool has_infinity = false, has_quiet_NaN = false;
  static constexpr int digits = sizeof(T) * 8 - is_signed, digits10 = digits * 3 / 10, radix = 2;
  static constexpr T max() { return static_cast<T>(~0ul >> (64 - digits)); }
  static constexpr T min() { return is_signed ? static_cast<T>(-max() - 1) : T(0); }
  static constexpr T lowest() { return min(); }
};
struct of_floating_point {
  static constexpr bool is_specialized = true, is_integer = false, is_signed = true, is_exact = false;
  static constexpr bool has_infinity = true, has_quiet_NaN = true;
  static constexpr int radix = 2;
};
}  // namespace simulator_limits

#define SIMULATOR_INTEGER(T) \
  template <>                \
  struct numeric_limits<T> : simulator_limits::of_integer<T> {};
SIMULATOR_INTEGER(char)
SIMULATOR_INTEGER(signed char)
SIMULATOR_INTEGER(uchar)
SIMULATOR_INTEGER(short)
SIMULATOR_INTEGER(ushort)
SIMULATOR_INTEGER(int)
SIMULATOR_INTEGER(uint)
SIMULATOR_INTEGER(long)
SIMULATOR_INTEGER(ulong)
#undef SIMULATOR_INTEGER

template <>
struct numeric_limits<bool> {
  static constexpr bool is_specialized = true, is_integer = true, is_signed = false, is_exact = true;
  static constexpr bool has_infinity = false, has_quiet_NaN = false;
  static constexpr int digits = 1, digits10 = 0, radix = 2;
  static constexpr bool max() { return true; }
  static constexpr bool min() { return false; }
  static constexpr bool lowest() { return false; }
};

// The arguments are the bits of the smallest normal number, the largest finite number, the ULP of 1, infinity, a quiet
// NaN, and the smallest subnormal number.
#define SIMULATOR_FLOATING_POINT(T, bits_type, precision, precision10, smallest, largest, step, infinite, nan, tiny) \
  template <>                                                                                                        \
  struct numeric_limits<T> : simulator_limits::of_floating_point {                                                   \
    static constexpr int digits = precision, digits10 = precision10;                                                 \
    static constexpr T of(bits_type bits) { return __builtin_bit_cast(T, bits); }                                    \
    static constexpr T min() { return of(smallest); }                                                                \
    static constexpr T max() { return of(largest); }                                                                 \
    static constexpr T lowest() { return -of(largest); }                                                             \
    static constexpr T epsilon() { return of(step); }                                                                \
    static constexpr T infinity() { return of(infinite); }                                                           \
    static constexpr T quiet_NaN() { return of(nan); }                                                               \
    static constexpr T signaling_NaN() { return of(nan); }                                                           \
    static constexpr T denorm_min() { return of(tiny); }                                                             \
  };
SIMULATOR_FLOATING_POINT(float, uint, 24, 6, 0x00800000, 0x7f7fffff, 0x34000000, 0x7f800000, 0x7fc00000, 1)
SIMULATOR_FLOATING_POINT(half, ushort, 11, 3, 0x0400, 0x7bff, 0x1400, 0x7c00, 0x7e00, 1)
SIMULATOR_FLOATING_POINT(bfloat, ushort, 8, 2, 0x0080, 0x7f7f, 0x3c00, 0x7f80, 0x7fc0, 1)
#undef SIMULATOR_FLOATING_POINT

}  // namespace metal
