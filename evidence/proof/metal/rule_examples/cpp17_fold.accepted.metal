#include <metal_stdlib>
using namespace metal;

template <typename T>
float sum(T value) {
  return value;
}
template <typename T, typename... Rest>
float sum(T value, Rest... rest) {
  return value + sum(rest...);
}

kernel void add(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  values[index] = sum(values[index], 1.0f, 2.0f);
}
