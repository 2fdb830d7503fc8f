// refused: must reside in constant address space
#include <metal_stdlib>
using namespace metal;

kernel void count(device int* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  static int calls = 0;
  values[index] = ++calls;
}
