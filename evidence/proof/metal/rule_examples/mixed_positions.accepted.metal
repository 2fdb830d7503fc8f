#include <metal_stdlib>
using namespace metal;

kernel void spread(device float* values [[buffer(0)]], uint2 group [[threadgroup_position_in_grid]],
                   uint2 inside [[thread_position_in_threadgroup]]) {
  values[group.x * 32 + inside.x] = 1.0f;
}
