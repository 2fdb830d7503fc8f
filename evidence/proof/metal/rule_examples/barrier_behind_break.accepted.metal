#include <metal_stdlib>
using namespace metal;

kernel void rounds(device float* values [[buffer(0)]], uint index [[thread_index_in_threadgroup]]) {
  for (int i = 0; i < 4; ++i) {
    if (values[0] > 1.0f) break;
    threadgroup_barrier(mem_flags::mem_device);
    values[index] *= 2.0f;
    threadgroup_barrier(mem_flags::mem_device);
  }
}
