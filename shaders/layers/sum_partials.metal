// Adds up partial sums [rows, elements, columns] to `elements` numbers, in a fixed order. A threadgroup owns 32
// elements, one per lane. Its simdgroups take rows in turn, and the first one adds their sums.
#include <metal_stdlib>

#include "layers/parameters.h"
using namespace metal;

template <typename T>
[[kernel]] void sum_partials(
    device const float* partials [[buffer(0)]],
    device T* result [[buffer(1)]],
    constant SumPartialsParameters& parameters [[buffer(2)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float sums[kSumRows * 32];
  const int element = int(group.x) * 32 + int(lane);
  float sum = 0.0f;
  for (int row = int(simdgroup); row < parameters.rows && element < parameters.elements; row += kSumRows) {
    device const float* row_partials = partials + (int64_t(row) * parameters.elements + element) * parameters.columns;
    float column_sum = 0.0f;
    for (int column = 0; column < parameters.columns; ++column) column_sum += row_partials[column];
    sum += column_sum;
  }
  sums[int(simdgroup) * 32 + int(lane)] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup != 0 || element >= parameters.elements) return;
  float total = 0.0f;
  for (int i = 0; i < kSumRows; ++i) total += sums[i * 32 + int(lane)];
  result[element] = T(total);
}
