// refused: threadgroup_barrier under a condition that differs between threads
#include <metal_stdlib>
using namespace metal;

void settle(bool is_needed) {
  if (is_needed) threadgroup_barrier(mem_flags::mem_device);
}

kernel void rounds(device float* values [[buffer(0)]], uint index [[thread_index_in_threadgroup]]) {
  const bool is_first = index == 0;
  if (is_first) values[0] = 1.0f;
  settle(is_first);
  values[index + 1] = values[0];
}
