// refused: constexpr function|not a constant expression|constant expression
#include <metal_stdlib>
using namespace metal;

kernel void choose(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  if constexpr (values[0] > 1.0f) values[index] = 1.0f;
}
