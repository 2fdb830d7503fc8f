// refused: simdgroup_multiply_accumulate of float and half
#include <metal_stdlib>
using namespace metal;

#include <metal_simdgroup_matrix>

kernel void square(device float* values [[buffer(0)]], device const half* factors [[buffer(1)]]) {
  simdgroup_half8x8 left, right;
  simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_load(left, factors, 8);
  simdgroup_load(right, factors, 8);
  simdgroup_multiply_accumulate(sum, left, right, sum);
  simdgroup_store(sum, values, 8);
}
