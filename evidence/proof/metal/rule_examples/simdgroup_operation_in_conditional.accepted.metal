#include <metal_stdlib>
using namespace metal;

kernel void largest(device float* values [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  const float most = simd_max(values[lane]);
  values[lane] = lane == 0 ? most : 0.0f;
}
