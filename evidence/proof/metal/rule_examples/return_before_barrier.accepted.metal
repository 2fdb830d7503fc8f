#include <metal_stdlib>
using namespace metal;

kernel void reverse(device float* values [[buffer(0)]], constant uint& count [[buffer(1)]],
                    uint group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]]) {
  threadgroup float staged[256];
  if (group >= count) return;  // the whole threadgroup
  if (index < count) staged[index] = values[index];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (index < count) values[index] = staged[count - 1 - index];
}
