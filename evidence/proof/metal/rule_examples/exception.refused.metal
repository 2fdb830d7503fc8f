// refused: 'throw' is not supported in Metal
#include <metal_stdlib>
using namespace metal;

kernel void roots(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  if (values[index] < 0.0f) throw 1;
  values[index] = sqrt(values[index]);
}
