#include <metal_stdlib>
using namespace metal;

namespace house {
namespace room {
constant float factor = 2.0f;
}
}  // namespace house

kernel void scale(device float* values [[buffer(0)]], uint index [[thread_position_in_grid]]) {
  values[index] *= house::room::factor;
}
