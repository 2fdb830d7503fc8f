// refused: lambda expressions are not supported in Metal
#include <metal_stdlib>
using namespace metal;

kernel void scale(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  const float factor = 2.0f;
  auto scaled = [=](float x) { return factor * x; };
  values[index] = scaled(values[index]);
}
