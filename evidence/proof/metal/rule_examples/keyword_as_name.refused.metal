// refused: 'vertex' is a word of Metal's
#include <metal_stdlib>
using namespace metal;

kernel void scale(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  const float vertex = 2.0f;
  values[index] *= vertex;
}
