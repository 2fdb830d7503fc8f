// refused: a threadgroup has at most 1024 threads
#include <metal_stdlib>
using namespace metal;

[[max_total_threads_per_threadgroup(2048)]] kernel void clear(device float* values [[buffer(0)]],
                                                              uint index [[thread_position_in_grid]]) {
  values[index] = 0.0f;
}
