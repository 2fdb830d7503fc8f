// refused: nested namespace definition is incompatible
#include <metal_stdlib>
using namespace metal;

namespace house::room {
constant float factor = 2.0f;
}

kernel void scale(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  values[index] *= house::room::factor;
}
