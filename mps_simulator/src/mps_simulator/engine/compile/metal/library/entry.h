// The code that is generated for each kernel uses these definitions. The compiler knows the types of the parameters,
// and the source transformation knows their attributes.
#pragma once

#define SIMULATOR_ENTRY __attribute__((disable_sanitizer_instrumentation, no_sanitize("thread")))

namespace simulator {

template <typename F>
struct signature;
template <typename... P>
struct signature<void(P...)> {
  template <int I>
  using parameter = __type_pack_element<I, P...>;
};

template <typename P>
struct pointee {
  static constexpr bool is_memory = false;
  typedef char type;
};
#define SIMULATOR_POINTEE(space)                                            \
  template <typename T>                                                     \
  struct pointee<space T*> {                                                \
    static constexpr bool is_memory = true;                                 \
    typedef T type;                                                         \
    METAL_FUNC static space T* bind(void* data) { return (space T*)data; }  \
  };                                                                        \
  template <typename T>                                                     \
  struct pointee<space T&> {                                                \
    static constexpr bool is_memory = true;                                 \
    typedef T type;                                                         \
    METAL_FUNC static space T& bind(void* data) { return *(space T*)data; } \
  };
SIMULATOR_POINTEE(device)
SIMULATOR_POINTEE(threadgroup)
SIMULATOR_POINTEE(__global)
#undef SIMULATOR_POINTEE

template <typename T>
struct layout {
  static constexpr uint32_t size = sizeof(T), alignment = alignof(T);
};
template <>
struct layout<void> {
  static constexpr uint32_t size = 1, alignment = 1;
};
template <>
struct layout<const void> : layout<void> {};

template <typename P>
struct layout_of : layout<typename pointee<P>::type> {};

// Returns whether the function constant in a parameter's [[function_constant(...)]] is true.
typedef bool (*gate_function)();
struct gate {
  uint32_t kernel_number, parameter_number;
  gate_function is_open;
};

// Says that a kernel needs a value for a function constant. Both are indices into the program's tables.
struct requirement {
  uint32_t kernel_number, constant_number;
};

// A reference points here if a false function constant leaves it out, because the optimiser may read through the
// reference before it tests the constant.
template <size_t size>
struct absent {
  alignas(16) static uchar bytes[size];
};
template <size_t size>
alignas(16) uchar absent<size>::bytes[size];

template <typename P>
METAL_FUNC P argument(void* data) {
  static_assert(pointee<P>::is_memory, "a buffer or threadgroup argument must be a pointer or a reference");
  if (__is_reference(P) && !data) data = absent<layout<__remove_cv(typename pointee<P>::type)>::size>::bytes;
  return pointee<P>::bind(data);
}

template <typename P>
struct position {
  static_assert(__is_same(P, uint) || __is_same(P, ushort), "a position or index must be (a vector of) uint or ushort");
  METAL_FUNC static P make(simulator_uint3 v) { return static_cast<P>(v.x); }
  METAL_FUNC static P make(uint v) { return static_cast<P>(v); }
};
template <typename T>
struct position<metal::vec<T, 2>> {
  static_assert(__is_same(T, uint) || __is_same(T, ushort), "a position must be a vector of uint or ushort");
  METAL_FUNC static metal::vec<T, 2> make(simulator_uint3 v) { return {v.x, v.y}; }
};
template <typename T>
struct position<metal::vec<T, 3>> {
  static_assert(__is_same(T, uint) || __is_same(T, ushort), "a position must be a vector of uint or ushort");
  METAL_FUNC static metal::vec<T, 3> make(simulator_uint3 v) { return {v.x, v.y, v.z}; }
};

template <typename T>
METAL_FUNC threadgroup T& threadgroup_variable(const char* name, size_t alignment = alignof(T)) {
  return *(threadgroup T*)simulator_threadgroup_array(name, sizeof(T), alignment);
}

// Puts a string literal into the constant address space, as in Metal.
METAL_FUNC constant char* constant_text(const __constant char* text) {
  return reinterpret_cast<constant char*>(reinterpret_cast<uintptr_t>(text));
}

}  // namespace simulator
