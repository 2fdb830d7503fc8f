// The interface between a compiled Metal kernel and the engine. compile/ generates code that uses it, and run/ and
// watch/ implement it. It has C linkage, so that a kernel's shared library resolves these names when it is loaded.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

struct simulator_uint3 {
  uint32_t x, y, z;
};
struct simulator_thread {
  simulator_uint3 thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
  simulator_uint3 threads_per_threadgroup, threadgroups_per_grid, threads_per_grid;
  uint32_t thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  uint32_t simdgroups_per_threadgroup, threads_per_simdgroup;
};

enum simulator_parameter_kind : uint32_t { simulator_buffer, simulator_threadgroup_memory, simulator_builtin };

struct simulator_parameter {
  const char* name;  // as the shader spells it
  simulator_parameter_kind kind;
  uint32_t index;       // [[buffer(index)]] or [[threadgroup(index)]]
  uint32_t value_size;  // sizeof the type that the pointer or reference names
  uint32_t value_alignment;
  bool is_constant_space;  // the address space is `constant`, not `device`
  bool is_const;           // the shader may not write it
  bool is_reference;       // a reference reads exactly one value
  bool is_present;         // false if a [[function_constant]] gate leaves it out; a buffer then need not be set
};

// Runs one thread. arguments[i] belongs to parameters[i]. It is the address of the data, or null for a builtin.
typedef void (*simulator_run)(void* const* arguments, const simulator_thread* thread);

struct simulator_kernel {
  const char* name;  // [[host_name]] if there is one, else the function's name
  const simulator_parameter* parameters;
  uint32_t parameter_count;
  uint32_t max_total_threads;  // [[max_total_threads_per_threadgroup]], or 0 if absent
  simulator_run run;
};

struct simulator_function_constant {
  const char* name;
  uint32_t index;
  uint32_t size;
  void* address;     // written before a dispatch whose pipeline gives it a value
  bool* is_defined;  // what is_function_constant_defined() reads
};

// Each kernel library exports:
//   const simulator_kernel simulator_kernels[];                     uint32_t simulator_kernel_count;
//   const simulator_function_constant simulator_function_constants[]; uint32_t simulator_function_constant_count;

// ---- what kernel code calls ----

enum simulator_memory_scope : uint32_t {
  simulator_mem_none = 0,
  simulator_mem_device = 1,
  simulator_mem_threadgroup = 2,
  simulator_mem_texture = 4
};

void simulator_threadgroup_barrier(uint32_t memory_scope);
void simulator_simdgroup_barrier(uint32_t memory_scope);

// Runs every simd_* and simdgroup_* operation. Each lane passes the address of its own slot and waits. The slot first
// holds the lane's operands, then its result. The last lane to arrive runs `combine` over all slots, and then all lanes
// continue. slots[i] is null if the simdgroup has no lane i. `operation` is a string literal, and `site` is the return
// address in the kernel. Lanes have diverged if they arrive at different operations, or at the same operation in
// different places.
typedef void (*simulator_combine)(void* const slots[32]);
void simulator_collective(const char* operation, const void* site, void* slot, simulator_combine combine);

// Returns an order of the 32 lanes for a reduction whose order Metal does not specify. It is 0..31 unless the
// perturbing mode shuffles it.
const uint8_t* simulator_reduction_order(void);

// Returns the threadgroup memory of an array that a kernel's body declares. The same name gives the same address in all
// threads of a threadgroup.
void* simulator_threadgroup_array(const char* name, size_t size, size_t alignment);

// Reports an index of a component that a vector of `count` components does not have.
[[noreturn]] void simulator_vector_index(int index, uint32_t count);

// Reports a NaN that only an unwritten private variable has. The caller is a function that would ignore the NaN.
[[noreturn]] void simulator_unwritten(void);

// In the perturbing mode, moves `value` by up to `ulps` float ULPs and flushes denormals. Returns it unchanged
// otherwise.
float simulator_perturb(float value, float ulps);

// Counts 8x8x8 matrix multiplications. `combine` calls this once per simdgroup operation.
void simulator_count_multiply(void);

// Kernels report loads and stores through the __tsan_* names that clang's -fsanitize=thread emits
// (watch/tsan_hooks.cpp). The kernel's own code checks private memory and the constants of a program
// (watch/private_memory.cpp).
}
