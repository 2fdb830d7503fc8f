#include <metal_stdlib>
using namespace metal;

struct Twice {
  static float apply(float x) { return 2 * x; }
};

template <typename Function>
float applied(float x) {
  return Function::apply(x);
}

kernel void apply(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  values[index] = applied<Twice>(values[index]);
}
