#include <metal_stdlib>
using namespace metal;

template <int N>
void choose(device float* values, uint index) {
  if constexpr (N > 1) values[index] = 1.0f;
}

kernel void choose_all(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  choose<2>(values, index);
}
