#include <metal_stdlib>
using namespace metal;

float scaled(float factor, float x) { return factor * x; }

kernel void scale(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  values[index] = scaled(2.0f, values[index]);
}
