#include <metal_stdlib>
using namespace metal;

kernel void count(device int* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  int calls = 0;
  values[index] = ++calls;
}
