// refused: simd_sum after the return at .*, which differs between lanes
#include <metal_stdlib>
using namespace metal;

kernel void total(device float* values [[buffer(0)]], constant uint& count [[buffer(1)]],
                  uint index [[thread_position_in_grid]]) {
  if (index >= count) return;
  values[index] = simd_sum(values[index]);
}
