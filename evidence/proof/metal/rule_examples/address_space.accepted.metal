#include <metal_stdlib>
using namespace metal;

void halve(device float* values, uint index) { values[index] *= 0.5f; }

kernel void halve_all(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  halve(values, index);
}
