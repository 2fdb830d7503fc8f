// refused: indexed by a value that is not known when it is compiled
#include <metal_stdlib>
using namespace metal;

kernel void table(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  float powers[4];
  for (int i = 0; i < 4; ++i) powers[i] = values[index] * float(i);
  values[index] = powers[2];
}
