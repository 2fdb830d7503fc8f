#include <metal_stdlib>
using namespace metal;

int factorial(int n) {
  int product = 1;
  for (int i = 2; i <= n; ++i) product *= i;
  return product;
}

kernel void factorials(device int* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  values[index] = factorial(values[index]);
}
