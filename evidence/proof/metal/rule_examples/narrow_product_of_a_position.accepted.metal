#include <metal_stdlib>
using namespace metal;

kernel void clear(device float* out [[buffer(0)]], constant uint& columns [[buffer(1)]],
                  uint2 at [[thread_position_in_grid]]) {
  out[ulong(at.y) * columns + at.x] = 0.0f;
}
