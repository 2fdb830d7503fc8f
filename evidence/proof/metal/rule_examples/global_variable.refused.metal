// refused: must reside in constant address space
#include <metal_stdlib>
using namespace metal;

float factor = 2.0f;

kernel void scale(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  values[index] *= factor;
}
