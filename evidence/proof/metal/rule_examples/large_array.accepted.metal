#include <metal_stdlib>
using namespace metal;

kernel void spill(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  float kept[128];
  _Pragma("clang loop unroll(full)") for (int i = 0; i < 128; ++i) kept[i] = values[index + i];
  _Pragma("clang loop unroll(full)") for (int i = 0; i < 128; ++i) values[index + i] = kept[127 - i];
}
