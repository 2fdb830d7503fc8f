#include <metal_stdlib>
using namespace metal;

[[max_total_threads_per_threadgroup(1024)]] kernel void clear(device float* values [[buffer(0)]],
                                                              uint index [[thread_position_in_grid]]) {
  values[index] = 0.0f;
}
