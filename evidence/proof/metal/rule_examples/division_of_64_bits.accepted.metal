#include <metal_stdlib>
using namespace metal;

constant constexpr int kTile = 128;

kernel void rows(device int64_t* index [[buffer(0)]], constant int& columns [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
  index[i] = index[i] / kTile + int(i) / columns;
}
