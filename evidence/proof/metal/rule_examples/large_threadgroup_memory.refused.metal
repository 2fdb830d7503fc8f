// refused: bytes of static threadgroup memory, the limit is 32768
#include <metal_stdlib>
using namespace metal;

kernel void stage(device float* values [[buffer(0)]], uint index [[thread_index_in_threadgroup]]) {
  threadgroup float staged[8193];
  staged[index] = values[index];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  values[index] = staged[index ^ 1];
}
