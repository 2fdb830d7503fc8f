// <metal_compute>, <metal_array> and <metal_uniform>: barriers, array, uniform.
#pragma once

namespace metal {

enum class mem_flags : uint {
  mem_none = simulator_mem_none,
  mem_device = simulator_mem_device,
  mem_threadgroup = simulator_mem_threadgroup,
  mem_texture = simulator_mem_texture,
};
METAL_FUNC constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return static_cast<mem_flags>(static_cast<uint>(a) | static_cast<uint>(b));
}
METAL_FUNC constexpr mem_flags operator&(mem_flags a, mem_flags b) {
  return static_cast<mem_flags>(static_cast<uint>(a) & static_cast<uint>(b));
}

METAL_FUNC void threadgroup_barrier(mem_flags flags) { simulator_threadgroup_barrier(static_cast<uint>(flags)); }
METAL_FUNC void simdgroup_barrier(mem_flags flags) { simulator_simdgroup_barrier(static_cast<uint>(flags)); }

template <typename T, size_t N>
struct array {
  T simulator_data[N];

  METAL_FUNC constexpr size_t size() const { return N; }
  METAL_FUNC constexpr T& operator[](size_t i) { return simulator_data[i]; }
  METAL_FUNC constexpr const T& operator[](size_t i) const { return simulator_data[i]; }
};

// A value that is the same in all threads. On a Mac this is a hint to Apple's compiler.
template <typename T>
struct uniform {
  T simulator_value;

  METAL_FUNC constexpr uniform(T value) : simulator_value(value) {}
  METAL_FUNC constexpr operator T() const { return simulator_value; }
};
template <typename T>
METAL_FUNC constexpr uniform<T> make_uniform(T value) {
  return {value};
}

}  // namespace metal
