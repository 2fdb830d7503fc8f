// In a simdgroup operation, each lane passes a slot, and the last lane to arrive computes all results.
#pragma once

// Marks code that works on slots. The watch skips it, because its accesses are not the kernel's. The compiler must not
// inline or merge it, because its call sites tell one simd_sum from another.
#define SIMULATOR_UNWATCHED __attribute__((noinline, nomerge, disable_sanitizer_instrumentation, no_sanitize("thread")))
#define SIMULATOR_SITE __builtin_return_address(0)

extern "C" {
__attribute__((nomerge)) void simulator_threadgroup_barrier(uint32_t memory_scope);
__attribute__((nomerge)) void simulator_simdgroup_barrier(uint32_t memory_scope);
}

// A string literal lies in OpenCL's constant address space, and no pointer converts from that space.
#define SIMULATOR_NAME(literal) \
  reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(static_cast<const __constant char*>(literal)))

namespace simulator {

struct lane_slot {
  uint lane;
};
SIMULATOR_UNWATCHED inline void number_lanes(void* const slots[32]) {
  for (uint lane = 0; lane < 32; ++lane) {
    if (slots[lane]) static_cast<lane_slot*>(slots[lane])->lane = lane;
  }
}
// Makes the lanes meet for an operation in which each lane makes its own memory accesses. Returns the lane's index.
SIMULATOR_UNWATCHED inline uint meet_all_lanes(const char* operation) {
  lane_slot slot;
  simulator_collective(operation, SIMULATOR_SITE, &slot, number_lanes);
  return slot.lane;
}

// Returns a conspicuous value for results that Metal leaves undefined.
template <typename T>
METAL_FUNC T undefined() {
  T value;
  __builtin_memset(&value, 0xff, sizeof(T));
  return value;
}

}  // namespace simulator
