// refused: 'typeid' is not supported in Metal
#include <metal_stdlib>
using namespace metal;

template <typename T>
void set(device T* values, uint index) {
  values[index] = typeid(T) == typeid(float) ? T(1) : T(2);
}

kernel void set_all(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) { set(values, index); }
