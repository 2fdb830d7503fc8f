#include <metal_stdlib>
using namespace metal;

kernel void clear(device float* out [[buffer(0)]], constant long& columns [[buffer(1)]],
                  uint row [[thread_position_in_grid]]) {
  const long index = row * columns;
  out[index] = 0.0f;
}
