// refused: can only be declared in a kernel
#include <metal_stdlib>
using namespace metal;

float first(device const float* values, uint index) {
  threadgroup float shared_value[1];
  if (index == 0) shared_value[0] = values[0];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return shared_value[0];
}

kernel void spread(device float* values [[buffer(0)]], uint index [[thread_index_in_threadgroup]]) {
  values[index] = first(values, index);
}
