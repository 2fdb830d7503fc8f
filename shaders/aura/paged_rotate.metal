// Computes Pi x, or Pi^T x if `inverse`, for each vector x of packed tokens. Padding is neither read nor written. A
// simdgroup owns 32 / lanes_of(D) vectors. A lane holds D / lanes_of(D) elements in registers, in f32.
// Layout: in and out [T, H, D] with strides.
#include "aura/pages.h"
#include "aura/rotation.h"
#include "core/indices.h"

template <typename In, typename Out, int D, bool kInverse>
[[kernel]] void paged_rotate(
    device const In* in [[buffer(0)]],
    device const float* signs [[buffer(1)]],
    device const int* cu_seqlens [[buffer(2)]],
    device Out* out [[buffer(3)]],
    constant PagedRotateParameters& parameters [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int kOwn = D / lanes_of(D);
  constexpr int kOfSimdgroup = 32 / lanes_of(D);
  int last = 0;  // the largest boundary; wrong boundaries may not end with it
  for (int i = int(lane); i <= parameters.sequences; i += 32) {
    const int64_t boundary = read_index(cu_seqlens, i * parameters.boundary, parameters.boundary_bytes);
    last = max(last, int(clamp(boundary, int64_t(0), int64_t(parameters.tokens))));
  }
  const int tokens = simd_max(last);
  const int64_t vector = (int64_t(group.x) * (kAuraThreads / 32) + simdgroup) * kOfSimdgroup + int(lane) / lanes_of(D);
  const int index = int(min(vector, int64_t(parameters.vectors - 1)));
  const int token = index / parameters.heads;
  const int head = index % parameters.heads;
  const bool is_present = vector < parameters.vectors && token < tokens;
  device const In* source = in + token * parameters.in.token + head * parameters.in.head;
  float values[kOwn];
  UNROLL for (int i = 0; i < kOwn; ++i) values[i] = is_present ? float(source[place_of<D>(i, lane)]) : 0.0f;
  rotate<D, kInverse>(values, signs, lane);
  const float factor = 1.0f / sqrt(float(D));
  device Out* target = out + token * parameters.out.token + head * parameters.out.head;
  UNROLL for (int i = 0; i < kOwn; ++i) {
    if (is_present) target[place_of<D>(i, lane)] = Out(values[i] * factor);
  }
}
