// refused: bytes of arrays and fragments a thread, the limit is 512
#include <metal_stdlib>
using namespace metal;

kernel void spill(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  float kept[130];
  _Pragma("clang loop unroll(full)") for (int i = 0; i < 130; ++i) kept[i] = values[index + i];
  _Pragma("clang loop unroll(full)") for (int i = 0; i < 130; ++i) values[index + i] = kept[129 - i];
}
