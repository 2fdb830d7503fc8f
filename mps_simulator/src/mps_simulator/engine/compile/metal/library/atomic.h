// <metal_atomic>. Only memory_order_relaxed exists, as in Metal up to language version 3.1.
#pragma once

namespace metal {

enum memory_order { memory_order_relaxed = __ATOMIC_RELAXED };

template <typename T>
struct atomic {
  static_assert(is_same<T, int>::value || is_same<T, uint>::value || is_same<T, bool>::value ||
                    is_same<T, float>::value || is_same<T, ulong>::value,
                "atomic: int, uint, bool, float or ulong");
  T simulator_value;
};
// OpenCL predeclares names such as atomic_int. The source transformation replaces them with these names.
typedef atomic<int> simulator_atomic_int;
typedef atomic<uint> simulator_atomic_uint;
typedef atomic<bool> simulator_atomic_bool;
typedef atomic<float> simulator_atomic_float;
typedef atomic<ulong> simulator_atomic_ulong;

}  // namespace metal

namespace simulator {

template <typename T>
struct atomic_bits {
  typedef T type;
};
template <>
struct atomic_bits<float> {
  typedef uint type;
};

}  // namespace simulator

namespace metal {

#define SIMULATOR_FETCH(space, name, expression)                                                                 \
  template <typename T>                                                                                          \
  METAL_FUNC T atomic_fetch_##name##_explicit(volatile space atomic<T>* object,                                  \
                                              typename type_identity<T>::type operand, memory_order) {           \
    typedef typename simulator::atomic_bits<T>::type Bits;                                                       \
    volatile space Bits* bits = (volatile space Bits*)object;                                                    \
    Bits expected = __atomic_load_n(bits, __ATOMIC_RELAXED), desired;                                            \
    T old;                                                                                                       \
    do {                                                                                                         \
      old = as_type<T>(expected);                                                                                \
      desired = as_type<Bits>(static_cast<T>(expression));                                                       \
    } while (!__atomic_compare_exchange_n(bits, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)); \
    return old;                                                                                                  \
  }
#define SIMULATOR_ATOMIC(space)                                                                                     \
  template <typename T>                                                                                             \
  METAL_FUNC T atomic_load_explicit(const volatile space atomic<T>* object, memory_order) {                         \
    typedef typename simulator::atomic_bits<T>::type Bits;                                                          \
    return as_type<T>(__atomic_load_n((const volatile space Bits*)object, __ATOMIC_RELAXED));                       \
  }                                                                                                                 \
  template <typename T>                                                                                             \
  METAL_FUNC void atomic_store_explicit(volatile space atomic<T>* object, typename type_identity<T>::type desired,  \
                                        memory_order) {                                                             \
    typedef typename simulator::atomic_bits<T>::type Bits;                                                          \
    __atomic_store_n((volatile space Bits*)object, as_type<Bits>(desired), __ATOMIC_RELAXED);                       \
  }                                                                                                                 \
  template <typename T>                                                                                             \
  METAL_FUNC T atomic_exchange_explicit(volatile space atomic<T>* object, typename type_identity<T>::type desired,  \
                                        memory_order) {                                                             \
    typedef typename simulator::atomic_bits<T>::type Bits;                                                          \
    return as_type<T>(__atomic_exchange_n((volatile space Bits*)object, as_type<Bits>(desired), __ATOMIC_RELAXED)); \
  }                                                                                                                 \
  template <typename T>                                                                                             \
  METAL_FUNC bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>* object, thread T* expected,       \
                                                        typename type_identity<T>::type desired, memory_order,      \
                                                        memory_order) {                                             \
    typedef typename simulator::atomic_bits<T>::type Bits;                                                          \
    Bits old = as_type<Bits>(*expected);                                                                            \
    bool exchanged = __atomic_compare_exchange_n((volatile space Bits*)object, &old, as_type<Bits>(desired), false, \
                                                 __ATOMIC_RELAXED, __ATOMIC_RELAXED);                               \
    *expected = as_type<T>(old);                                                                                    \
    return exchanged;                                                                                               \
  }                                                                                                                 \
  SIMULATOR_FETCH(space, add, old + operand)                                                                        \
  SIMULATOR_FETCH(space, sub, old - operand)                                                                        \
  SIMULATOR_FETCH(space, min, min(old, operand))                                                                    \
  SIMULATOR_FETCH(space, max, max(old, operand))                                                                    \
  SIMULATOR_FETCH(space, and, old& operand)                                                                         \
  SIMULATOR_FETCH(space, or, old | operand)                                                                         \
  SIMULATOR_FETCH(space, xor, old ^ operand)
SIMULATOR_ATOMIC(device)
SIMULATOR_ATOMIC(threadgroup)
#undef SIMULATOR_ATOMIC
#undef SIMULATOR_FETCH

}  // namespace metal
