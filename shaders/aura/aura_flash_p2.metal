// A simdgroup owns 32 / lanes_of(D) query rows; a lane holds D / lanes_of(D) elements of o in registers, in f32.
// Layout: o_partials [B, HQ, L, NB, D], m, l and mean [B, HQ, L, NB] f32, o [B, HQ, L, D], contiguous.
// o = Pi^T (sum of exp(m - M) o_partials) / l + (sum of exp(m - M) mean) / l, l with the sink's exponential.
#include "aura/aura_flash_p2.h"
#include "aura/rotation.h"

template <typename T, int D>
[[kernel]] void aura_flash_p2(
    device const float* o_partials [[buffer(0)]],
    device const float* m_partials [[buffer(1)]],
    device const float* l_partials [[buffer(2)]],
    device const float* mean_partials [[buffer(3)]],
    device const float* sinks [[buffer(4)]],
    device const float* signs [[buffer(5)]],
    device T* o [[buffer(6)]],
    constant MergeParameters& parameters [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int kLanes = lanes_of(D);
  constexpr int kOwn = D / kLanes;
  const VectorPlace place = vector_place<D>(parameters.vectors, group.x, simdgroup, lane);
  const int64_t first = place.index * parameters.blocks;

  float sink = -INFINITY;
  if (parameters.has_sinks != 0) sink = sinks[place.head];
  float largest = sink;
  for (int block = int(lane) % kLanes; block < parameters.blocks; block += kLanes) {
    largest = fmax(largest, m_partials[first + block]);
  }
  largest = max_over_lanes<D>(largest);

  float values[kOwn];
  UNROLL for (int i = 0; i < kOwn; ++i) values[i] = 0.0f;
  float sum = 0.0f;
  float mean = 0.0f;
  for (int block = 0; block < parameters.blocks; ++block) {
    const float l = l_partials[first + block];
    const float factor = l == 0.0f ? 0.0f : exp(m_partials[first + block] - largest);
    sum = fma(factor, l, sum);
    if (parameters.has_means != 0) mean = fma(factor, mean_partials[first + block], mean);
    device const float* part = o_partials + (first + block) * D;
    UNROLL for (int i = 0; i < kOwn; ++i) values[i] = fma(factor, part[place_of<D>(i, lane)], values[i]);
  }
  if (parameters.has_sinks != 0) sum += exp(sink - largest);

  rotate<D, true>(values, signs, lane);
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // no key was seen: 0
  const float factor = inverse / sqrt(float(D));
  UNROLL for (int i = 0; i < kOwn; ++i) {
    if (place.present) o[place.index * D + place_of<D>(i, lane)] = T(fma(values[i], factor, mean * inverse));
  }
}
