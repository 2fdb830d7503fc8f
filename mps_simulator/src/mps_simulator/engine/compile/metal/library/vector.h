// vec<T, 2>, vec<T, 3>, vec<T, 4>, their packed forms and their operators. The source transformation rewrites a swizzle
// of more than one letter. It turns `v.xz` into v.swizzle<0, 2>(), or into v.swizzle_reference<0, 2>() if it is
// assigned to.
//
// Function templates take their arguments by value or name the address space. A plain `const T&` would deduce a T that
// includes the argument's address space.
#pragma once

namespace simulator {

template <int... I>
struct indices {};
template <typename T, T... I>
using indices_of = indices<I...>;
template <int N>
using make_indices = __make_integer_seq<indices_of, int, N>;

template <typename T>
struct is_number {
  static constexpr bool value = __is_arithmetic(T) || __is_same(T, bfloat);
};

template <typename T, int N>
struct members;
template <typename T>
struct alignas(2 * sizeof(T)) members<T, 2> {
  union {
    struct {
      T x, y;
    };
    struct {
      T r, g;
    };
  };
};
template <typename T>
struct alignas(4 * sizeof(T)) members<T, 3> {
  union {
    struct {
      T x, y, z;
    };
    struct {
      T r, g, b;
    };
  };
};
template <typename T>
struct alignas(4 * sizeof(T)) members<T, 4> {
  union {
    struct {
      T x, y, z, w;
    };
    struct {
      T r, g, b, a;
    };
  };
};

METAL_FUNC int checked_index(int i, int count) {
  if (static_cast<uint>(i) >= static_cast<uint>(count)) simulator_vector_index(i, count);
  return i;
}

// Loads and stores a vector of up to 16 bytes as a whole, so that the watch sees one access, as on a GPU.
template <typename T>
struct native_element {
  typedef T type;
  METAL_FUNC static T from(T value) { return value; }
  METAL_FUNC static T to(T value) { return value; }
};
template <>
struct native_element<bool> {
  typedef uchar type;
  METAL_FUNC static bool from(uchar value) { return value != 0; }
  METAL_FUNC static uchar to(bool value) { return value; }
};
template <>
struct native_element<bfloat> {
  typedef ushort type;
  METAL_FUNC static bfloat from(ushort value) { return __builtin_bit_cast(bfloat, value); }
  METAL_FUNC static ushort to(bfloat value) { return __builtin_bit_cast(ushort, value); }
};

}  // namespace simulator

namespace metal {
template <typename T, int N>
struct vec;
}

namespace simulator {

template <typename T>
struct width {
  static constexpr int value = 1;
};
template <typename T, int N>
struct width<metal::vec<T, N>> {
  static constexpr int value = N;
};

template <typename T, int I, typename First, typename... Rest>
METAL_FUNC constexpr T component(First first, Rest... rest) {
  if constexpr (I >= width<First>::value) {
    return component<T, I - width<First>::value>(rest...);
  } else if constexpr (width<First>::value == 1) {
    return static_cast<T>(first);
  } else {
    return static_cast<T>(first.template get<I>());
  }
}

template <typename... A>
struct total_width;
template <>
struct total_width<> {
  static constexpr int value = 0;
};
template <typename First, typename... Rest>
struct total_width<First, Rest...> {
  static constexpr int value = width<First>::value + total_width<Rest...>::value;
};

template <typename Vector, typename T, int... I>
struct swizzle_reference {
  typedef metal::vec<T, sizeof...(I)> value_type;
  Vector& vector;

  METAL_FUNC operator value_type() const { return value_type(vector.template get<I>()...); }
  METAL_FUNC void operator=(value_type value) { assign(value, make_indices<sizeof...(I)>()); }
  METAL_FUNC void operator=(const swizzle_reference& other) { *this = static_cast<value_type>(other); }
  METAL_FUNC void operator+=(value_type value) { *this = static_cast<value_type>(*this) + value; }
  METAL_FUNC void operator-=(value_type value) { *this = static_cast<value_type>(*this) - value; }
  METAL_FUNC void operator*=(value_type value) { *this = static_cast<value_type>(*this) * value; }
  METAL_FUNC void operator/=(value_type value) { *this = static_cast<value_type>(*this) / value; }

 private:
  template <int... J>
  METAL_FUNC void assign(value_type value, indices<J...>) {
    ((vector.template get<I>() = value.template get<J>()), ...);
  }
};

}  // namespace simulator

namespace metal {

template <typename T, int N>
struct vec : simulator::members<T, N> {
  typedef simulator::members<T, N> members;
  typedef simulator::make_indices<N> indices;
  typedef T value_type;

  vec() = default;
  METAL_FUNC constexpr vec(T value) : members(build(indices(), repeated{value})) {}
  METAL_FUNC constexpr vec(const vec& other) : members(other.load()) {}
  template <typename U, typename = enable_if_t<!is_same<U, T>::value>>
  METAL_FUNC explicit constexpr vec(vec<U, N> other) : members(build(indices(), other)) {}
  template <typename A, typename B, typename... Rest,
            typename = enable_if_t<simulator::total_width<A, B, Rest...>::value == N>>
  METAL_FUNC constexpr vec(A a, B b, Rest... rest) : members(build(indices(), a, b, rest...)) {}

  METAL_FUNC constexpr vec& operator=(const vec& other) {
    store(vec(other));  // loads it whole
    return *this;
  }

  template <int I>
  METAL_FUNC constexpr T& get() {
    if constexpr (I == 0) return this->x;
    if constexpr (I == 1) return this->y;
    if constexpr (I == 2) return this->z;
    if constexpr (I == 3) return this->w;
  }
  template <int I>
  METAL_FUNC constexpr const T& get() const {
    if constexpr (I == 0) return this->x;
    if constexpr (I == 1) return this->y;
    if constexpr (I == 2) return this->z;
    if constexpr (I == 3) return this->w;
  }
  METAL_FUNC T& operator[](int i) { return reinterpret_cast<T*>(this)[simulator::checked_index(i, N)]; }
  METAL_FUNC const T& operator[](int i) const {
    return reinterpret_cast<const T*>(this)[simulator::checked_index(i, N)];
  }

  template <int... I>
  METAL_FUNC constexpr vec<T, sizeof...(I)> swizzle() const {
    return vec<T, sizeof...(I)>(get<I>()...);
  }
  template <int... I>
  METAL_FUNC simulator::swizzle_reference<vec, T, I...> swizzle_reference() {
    return {*this};
  }

 private:
  typedef simulator::native_element<T> element;
  static constexpr bool is_native = N != 3 && sizeof(T) * N <= 16;
  typedef typename element::type native __attribute__((ext_vector_type(is_native ? N : 2)));

  struct repeated {
    T value;
  };
  template <int... I>
  METAL_FUNC static constexpr members build(simulator::indices<I...>, repeated all) {
    return {{{(static_cast<void>(I), all.value)...}}};
  }
  template <int... I, typename... A>
  METAL_FUNC static constexpr members build(simulator::indices<I...>, A... a) {
    return {{{simulator::component<T, I>(a...)...}}};
  }

  template <int... I>
  METAL_FUNC static constexpr members from_native(native value, simulator::indices<I...>) {
    return {{{element::from(value[I])...}}};
  }
  template <int... I>
  METAL_FUNC constexpr members each(simulator::indices<I...>) const {
    return {{{get<I>()...}}};
  }
  METAL_FUNC constexpr members load() const {
    if constexpr (is_native) {
      if (!__builtin_is_constant_evaluated()) return from_native(*reinterpret_cast<const native*>(this), indices());
    }
    return each(indices());
  }
  template <int... I>
  METAL_FUNC static native to_native(const vec& value, simulator::indices<I...>) {
    return native{element::to(value.template get<I>())...};
  }
  template <int... I>
  METAL_FUNC constexpr void assign(const vec& other, simulator::indices<I...>) {
    ((get<I>() = other.template get<I>()), ...);
  }
  METAL_FUNC constexpr void store(const vec& other) {
    if constexpr (is_native) {
      if (!__builtin_is_constant_evaluated()) {
        *reinterpret_cast<native*>(this) = to_native(other, indices());
        return;
      }
    }
    assign(other, indices());
  }
};

}  // namespace metal

namespace simulator {

// Converts a scalar operand of a vector operation to the vector's type if an implicit conversion exists.
template <typename S, typename T>
struct is_operand {
  static constexpr bool value = is_number<S>::value && __is_convertible(S, T);
};

template <typename Result, typename Operation, int N, int... I, typename... A>
METAL_FUNC constexpr metal::vec<Result, N> each(indices<I...>, Operation, A... a) {
  return metal::vec<Result, N>(Operation::template apply<I>(a...)...);
}

}  // namespace simulator

namespace metal {

#define SIMULATOR_BINARY(op, Result, name)                                                                       \
  struct simulator_##name {                                                                                      \
    template <int I, typename V>                                                                                 \
    METAL_FUNC static constexpr auto apply(V a, V b) {                                                           \
      typedef typename V::value_type T;                                                                          \
      return static_cast<Result>(a.template get<I>() op b.template get<I>());                                    \
    }                                                                                                            \
  };                                                                                                             \
  template <typename T, int N>                                                                                   \
  METAL_FUNC constexpr vec<Result, N> operator op(vec<T, N> a, vec<T, N> b) {                                    \
    return simulator::each<Result, simulator_##name, N>(simulator::make_indices<N>(), simulator_##name(), a, b); \
  }                                                                                                              \
  template <typename T, int N, typename S, typename = enable_if_t<simulator::is_operand<S, T>::value>>           \
  METAL_FUNC constexpr vec<Result, N> operator op(vec<T, N> a, S b) {                                            \
    return a op vec<T, N>(static_cast<T>(b));                                                                    \
  }                                                                                                              \
  template <typename T, int N, typename S, typename = enable_if_t<simulator::is_operand<S, T>::value>>           \
  METAL_FUNC constexpr vec<Result, N> operator op(S a, vec<T, N> b) {                                            \
    return vec<T, N>(static_cast<T>(a)) op b;                                                                    \
  }
#define SIMULATOR_ARITHMETIC(op, name)                                                                 \
  SIMULATOR_BINARY(op, T, name)                                                                        \
  template <typename T, int N>                                                                         \
  METAL_FUNC constexpr vec<T, N>& operator op##=(vec<T, N>& a, vec<T, N> b) {                          \
    return a = a op b;                                                                                 \
  }                                                                                                    \
  template <typename T, int N, typename S, typename = enable_if_t<simulator::is_operand<S, T>::value>> \
  METAL_FUNC constexpr vec<T, N>& operator op##=(vec<T, N>& a, S b) {                                  \
    return a = a op vec<T, N>(static_cast<T>(b));                                                      \
  }
SIMULATOR_ARITHMETIC(+, add)
SIMULATOR_ARITHMETIC(-, subtract)
SIMULATOR_ARITHMETIC(*, multiply)
SIMULATOR_ARITHMETIC(/, divide)
SIMULATOR_ARITHMETIC(%, modulo)
SIMULATOR_ARITHMETIC(&, bit_and)
SIMULATOR_ARITHMETIC(|, bit_or)
SIMULATOR_ARITHMETIC(^, bit_xor)
SIMULATOR_ARITHMETIC(<<, shift_left)
SIMULATOR_ARITHMETIC(>>, shift_right)
SIMULATOR_BINARY(==, bool, equal)
SIMULATOR_BINARY(!=, bool, not_equal)
SIMULATOR_BINARY(<, bool, less)
SIMULATOR_BINARY(<=, bool, less_equal)
SIMULATOR_BINARY(>, bool, greater)
SIMULATOR_BINARY(>=, bool, greater_equal)
SIMULATOR_BINARY(&&, bool, logical_and)
SIMULATOR_BINARY(||, bool, logical_or)
#undef SIMULATOR_ARITHMETIC
#undef SIMULATOR_BINARY

#define SIMULATOR_UNARY(op, Result, name)                                                                     \
  struct simulator_##name {                                                                                   \
    template <int I, typename V>                                                                              \
    METAL_FUNC static constexpr auto apply(V a) {                                                             \
      typedef typename V::value_type T;                                                                       \
      return static_cast<Result>(op a.template get<I>());                                                     \
    }                                                                                                         \
  };                                                                                                          \
  template <typename T, int N>                                                                                \
  METAL_FUNC constexpr vec<Result, N> operator op(vec<T, N> a) {                                              \
    return simulator::each<Result, simulator_##name, N>(simulator::make_indices<N>(), simulator_##name(), a); \
  }
SIMULATOR_UNARY(-, T, negate)
SIMULATOR_UNARY(+, T, plus)
SIMULATOR_UNARY(~, T, complement)
SIMULATOR_UNARY(!, bool, logical_not)
#undef SIMULATOR_UNARY

// packed_float3 and similar types have no padding, and the alignment of one component.
template <typename T, int N>
struct packed_vec {
  T simulator_data[N];

  packed_vec() = default;
  METAL_FUNC packed_vec(vec<T, N> value) {
    for (int i = 0; i < N; ++i) simulator_data[i] = value[i];
  }
  METAL_FUNC packed_vec(T value) : packed_vec(vec<T, N>(value)) {}
  template <typename A, typename B, typename... Rest>
  METAL_FUNC packed_vec(A a, B b, Rest... rest) : packed_vec(vec<T, N>(a, b, rest...)) {}
  METAL_FUNC operator vec<T, N>() const {
    vec<T, N> value;
    for (int i = 0; i < N; ++i) value[i] = simulator_data[i];
    return value;
  }
  METAL_FUNC T& operator[](int i) { return simulator_data[i]; }
  METAL_FUNC const T& operator[](int i) const { return simulator_data[i]; }
};

}  // namespace metal

#define SIMULATOR_VECTORS(T)                     \
  typedef metal::vec<T, 2> T##2;                 \
  typedef metal::vec<T, 3> T##3;                 \
  typedef metal::vec<T, 4> T##4;                 \
  typedef metal::packed_vec<T, 2> packed_##T##2; \
  typedef metal::packed_vec<T, 3> packed_##T##3; \
  typedef metal::packed_vec<T, 4> packed_##T##4;
SIMULATOR_VECTORS(bool)
SIMULATOR_VECTORS(char)
SIMULATOR_VECTORS(uchar)
SIMULATOR_VECTORS(short)
SIMULATOR_VECTORS(ushort)
SIMULATOR_VECTORS(int)
SIMULATOR_VECTORS(uint)
SIMULATOR_VECTORS(long)
SIMULATOR_VECTORS(ulong)
SIMULATOR_VECTORS(half)
SIMULATOR_VECTORS(bfloat)
SIMULATOR_VECTORS(float)
#undef SIMULATOR_VECTORS

namespace simulator {

template <typename T>
struct bits_of {
  typedef T type;
};
template <typename T, int N>
struct bits_of<metal::vec<T, N>> {
  typedef members<T, N> type;
};

template <typename To>
struct from_bits {
  METAL_FUNC static constexpr To make(To value) { return value; }
};
template <typename T, int N>
struct from_bits<metal::vec<T, N>> {
  template <int... I>
  METAL_FUNC static constexpr metal::vec<T, N> make(members<T, N> value, indices<I...>) {
    return metal::vec<T, N>(get<I>(value)...);
  }
  template <int I>
  METAL_FUNC static constexpr T get(members<T, N> value) {
    if constexpr (I == 0) return value.x;
    if constexpr (I == 1) return value.y;
    if constexpr (I == 2) return value.z;
    if constexpr (I == 3) return value.w;
  }
  METAL_FUNC static constexpr metal::vec<T, N> make(members<T, N> value) { return make(value, make_indices<N>()); }
};

}  // namespace simulator

template <typename To, typename From>
METAL_FUNC constexpr To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type: the two types must have the same size");
  typedef typename simulator::bits_of<From>::type FromBits;
  typedef typename simulator::bits_of<To>::type ToBits;
  return simulator::from_bits<To>::make(__builtin_bit_cast(ToBits, static_cast<const FromBits&>(value)));
}
