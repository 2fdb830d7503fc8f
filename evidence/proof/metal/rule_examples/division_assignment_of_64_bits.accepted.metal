#include <metal_stdlib>
using namespace metal;

kernel void rows(device int* index [[buffer(0)]], constant int& columns [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
  index[i] /= columns;
}
