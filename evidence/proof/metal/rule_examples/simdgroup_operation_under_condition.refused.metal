// refused: simd_sum under a condition that differs between lanes
#include <metal_stdlib>
using namespace metal;

kernel void total(device float* values [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  float sum = 0.0f;
  if (lane < 16) sum = simd_sum(values[lane]);
  values[lane] = sum;
}
