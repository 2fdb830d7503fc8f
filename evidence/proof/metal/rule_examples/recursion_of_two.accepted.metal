#include <metal_stdlib>
using namespace metal;

int is_odd(int n) { return n & 1; }
int is_even(int n) { return 1 - is_odd(n); }

kernel void parities(device int* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  values[index] = is_even(values[index]);
}
