// refused: threadgroup_barrier under a condition that differs between threads
#include <metal_stdlib>
using namespace metal;

kernel void spread(device float* values [[buffer(0)]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float staged[1];
  if (simdgroup == 0) {
    staged[0] = values[0];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  values[simdgroup] = staged[0];
}
