// refused: may not fit into 32 bits, and is an index into device memory
#include <metal_stdlib>
using namespace metal;

kernel void copy(device float* out [[buffer(0)]], device const float* x [[buffer(1)]],
                 device const int* rows [[buffer(2)]], constant int& row_stride [[buffer(3)]],
                 uint column [[thread_position_in_grid]]) {
  const int row = rows[0];
  const int index = row * row_stride + column;
  out[index] = x[index];
}
