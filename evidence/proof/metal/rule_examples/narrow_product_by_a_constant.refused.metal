// refused: may not fit into 32 bits, and is an index into device memory
#include <metal_stdlib>
using namespace metal;

kernel void clear(device float* out [[buffer(0)]], device const int* rows [[buffer(1)]],
                  uint lane [[thread_index_in_simdgroup]]) {
  const int row = rows[0];
  device float* own = out + row * 128;
  own[lane] = 0.0f;
}
