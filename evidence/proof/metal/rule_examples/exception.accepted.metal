#include <metal_stdlib>
using namespace metal;

kernel void roots(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  if (values[index] < 0.0f) return;
  values[index] = sqrt(values[index]);
}
