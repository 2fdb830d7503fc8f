// Thread i copies byte i of at most 4,096 bytes, which are part of the command. Any dtype and alignment will do:
//
//   dst[first + i] = src[i]
//
// Layout: dst and src as bytes, contiguous.
#include <metal_stdlib>

#include "layers/parameters.h"

using namespace metal;

template <int Threads>
[[kernel]] void copy_from_host(
    device uchar* dst [[buffer(0)]],
    device const uchar* src [[buffer(1)]],
    constant CopyFromHostParameters& parameters [[buffer(2)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  static_assert(Threads == kHostCopyThreads, "the host's grid is made of so many threads");
  const int index = int(group.x) * Threads + int(thread_index);
  if (index < parameters.bytes) dst[parameters.first + index] = src[index];
}
