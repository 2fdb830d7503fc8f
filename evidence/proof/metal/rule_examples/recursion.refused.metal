// refused: 'factorial' calls itself
#include <metal_stdlib>
using namespace metal;

int factorial(int n) { return n < 2 ? 1 : n * factorial(n - 1); }

kernel void factorials(device int* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  values[index] = factorial(values[index]);
}
