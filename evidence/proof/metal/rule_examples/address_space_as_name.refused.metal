// refused: expected|error
#include <metal_stdlib>
using namespace metal;

kernel void scale(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  const float device = 2.0f;
  values[index] *= device;
}
