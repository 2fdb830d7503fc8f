#include <metal_stdlib>
using namespace metal;

kernel void total(device float* values [[buffer(0)]], constant uint& count [[buffer(1)]],
                  uint index [[thread_position_in_grid]]) {
  const float sum = simd_sum(index < count ? values[index] : 0.0f);
  if (index < count) values[index] = sum;
}
