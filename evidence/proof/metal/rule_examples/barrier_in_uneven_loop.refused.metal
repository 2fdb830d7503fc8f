// refused: threadgroup_barrier under a condition that differs between threads
#include <metal_stdlib>
using namespace metal;

kernel void rounds(device float* values [[buffer(0)]], constant int& count [[buffer(1)]],
                   uint index [[thread_index_in_threadgroup]]) {
  for (int i = int(index); i < count; i += 256) {
    values[i] *= 2.0f;
    threadgroup_barrier(mem_flags::mem_device);
  }
}
