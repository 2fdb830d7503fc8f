// refused: 'is_even' calls itself
#include <metal_stdlib>
using namespace metal;

int is_odd(int n);
int is_even(int n) { return n == 0 ? 1 : is_odd(n - 1); }
int is_odd(int n) { return n == 0 ? 0 : is_even(n - 1); }

kernel void parities(device int* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  values[index] = is_even(values[index]);
}
