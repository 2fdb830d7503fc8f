#include <metal_stdlib>
using namespace metal;

kernel void clamp_all(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  const float value = values[index];
  if (value > 1.0f) values[index] = 1.0f;
}
