// refused: threadgroup_barrier after the return at .*, which differs between threads
#include <metal_stdlib>
using namespace metal;

kernel void reverse(device float* values [[buffer(0)]], constant uint& count [[buffer(1)]],
                    uint index [[thread_index_in_threadgroup]]) {
  threadgroup float staged[256];
  if (index >= count) return;
  staged[index] = values[index];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  values[index] = staged[count - 1 - index];
}
