#include <metal_stdlib>
using namespace metal;

kernel void rounds(device float* values [[buffer(0)]], constant int& count [[buffer(1)]],
                   uint index [[thread_index_in_threadgroup]]) {
  for (int first = 0; first < count; first += 256) {
    const int i = first + int(index);
    if (i < count) values[i] *= 2.0f;
    threadgroup_barrier(mem_flags::mem_device);
  }
}
