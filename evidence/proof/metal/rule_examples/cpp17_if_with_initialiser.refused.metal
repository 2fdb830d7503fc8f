// refused: init.*statement.* incompatible
#include <metal_stdlib>
using namespace metal;

kernel void clamp_all(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  if (const float value = values[index]; value > 1.0f) values[index] = 1.0f;
}
