// refused: points to a function
#include <metal_stdlib>
using namespace metal;

float twice(float x) { return 2 * x; }

kernel void apply(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  float (*function)(float) = twice;
  values[index] = function(values[index]);
}
