// refused: Apple's GPUs have no 64-bit division
#include <metal_stdlib>
using namespace metal;

kernel void rows(device int64_t* index [[buffer(0)]], constant int& columns [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
  index[i] = index[i] / columns;
}
