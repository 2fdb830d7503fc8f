// refused: positions of a kernel must be all scalars or vectors of one width
#include <metal_stdlib>
using namespace metal;

kernel void spread(device float* values [[buffer(0)]], uint2 group [[threadgroup_position_in_grid]],
                   uint inside [[thread_position_in_threadgroup]]) {
  values[group.x * 32 + inside] = 1.0f;
}
