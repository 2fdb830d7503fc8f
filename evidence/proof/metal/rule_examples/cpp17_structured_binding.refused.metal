// refused: decomposition declarations are incompatible
#include <metal_stdlib>
using namespace metal;

struct Pair {
  float first, second;
};

kernel void add(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  Pair pair;
  pair.first = values[2 * index];
  pair.second = values[2 * index + 1];
  const auto [a, b] = pair;
  values[index] = a + b;
}
