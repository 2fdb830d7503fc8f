#include <metal_stdlib>
using namespace metal;

kernel void total(device float* values [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  const float sum = simd_sum(lane < 16 ? values[lane] : 0.0f);
  values[lane] = sum;
}
