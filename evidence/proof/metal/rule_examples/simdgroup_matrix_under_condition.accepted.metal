#include <metal_stdlib>
using namespace metal;

#include <metal_simdgroup_matrix>

kernel void square(device float* values [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_float8x8 matrix, sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_load(matrix, values, 8);
  if (simd_any(values[lane] > 0.0f)) simdgroup_multiply_accumulate(sum, matrix, matrix, sum);
  simdgroup_store(sum, values, 8);
}
