// A simdgroup owns 32 / lanes_of(D) vectors. A lane holds D / lanes_of(D) elements in registers, in f32.
// Layout: x [B, H, T, D] with strides, y [B, H, T, D] f32, contiguous.
//     y = scale Pi x, or with kInverse scale Pi^T x
#include "aura/parameters.h"
#include "aura/rotation.h"

template <typename T, int D, bool kInverse>
[[kernel]] void aura_rotate(
    device const T* x [[buffer(0)]],
    device const float* signs [[buffer(1)]],
    device float* y [[buffer(2)]],
    constant RotateParameters& parameters [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int kOwn = D / lanes_of(D);
  const VectorPlace place = vector_place<D>(parameters.vectors, group.x, simdgroup, lane);
  device const T* source = x + offset_of(parameters.x, place.batch, place.head, place.token);
  float values[kOwn];
  UNROLL for (int i = 0; i < kOwn; ++i) values[i] = float(source[place_of<D>(i, lane)]);
  rotate<D, kInverse>(values, signs, lane);
  const float factor = parameters.scale / sqrt(float(D));
  UNROLL for (int i = 0; i < kOwn; ++i) {
    if (place.present) y[place.index * D + place_of<D>(i, lane)] = values[i] * factor;
  }
}
