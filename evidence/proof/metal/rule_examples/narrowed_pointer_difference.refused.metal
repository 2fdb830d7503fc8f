// refused: implicit conversion loses integer precision
#include <metal_stdlib>
using namespace metal;

float sum(device const float* first, device const float* last) {
  const int count = last - first;
  float total = 0.0f;
  for (long i = 0; i < count; ++i) total += first[i];
  return total;
}

kernel void sums(device float* out [[buffer(0)]], device const float* x [[buffer(1)]],
                 uint index [[thread_position_in_grid]]) {
  out[index] = sum(x, x + index);
}
