// refused: threadgroup_barrier under a condition that differs between threads
#include <metal_stdlib>
using namespace metal;

kernel void rounds(device float* values [[buffer(0)]], uint index [[thread_index_in_threadgroup]]) {
  for (int i = 0; i < 4; ++i) {
    if (values[index] > 1.0f) break;
    values[index] *= 2.0f;
    threadgroup_barrier(mem_flags::mem_device);
  }
}
