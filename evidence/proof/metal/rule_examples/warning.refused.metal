// refused: unused variable 'half_of_it'
#include <metal_stdlib>
using namespace metal;

kernel void halve_all(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  const float half_of_it = values[index] * 0.5f;
  values[index] *= 0.5f;
}
