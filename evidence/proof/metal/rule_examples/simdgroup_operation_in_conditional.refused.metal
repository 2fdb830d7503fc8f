// refused: simd_max under a condition that differs between lanes
#include <metal_stdlib>
using namespace metal;

kernel void largest(device float* values [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  values[lane] = lane == 0 ? simd_max(values[lane]) : 0.0f;
}
