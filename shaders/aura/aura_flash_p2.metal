// Merges the blocks of pass 1. A simdgroup owns 32 / lanes_of(D) query rows. If there are many blocks, 4 simdgroups
// share these rows, and each reads a quarter of the blocks. A lane holds D / lanes_of(D) elements of o in registers, in
// f32. Threadgroup memory holds the elements of the other simdgroups.
// Layout: o_partials [B, HQ, L, NB, D], m and l [B, HQ, L, NB] f32, o [B, HQ, L, D], all contiguous.
//     o = Pi^T (sum of exp(m - M) o_partials) / l
// l includes the sink's exponential. The last blocks belong to exact rows; their part of o is not rotated back.
#include "aura/parameters.h"
#include "aura/rotation.h"

struct Partials {
  device const float* o;
  device const float* m;
  device const float* l;
};

// Adds blocks `first`, `first + step`, ... of a row. It loads all of them before it adds the first, because one load
// takes longer than all additions.
template <int D, int kCount>
METAL_FUNC void add_blocks(
    thread float* values, thread float& sum, Partials partials, int64_t first, int64_t step, float largest, uint lane) {
  constexpr int kOwn = D / lanes_of(D);
  float l[kCount];
  float m[kCount];
  float parts[kCount * kOwn];
  UNROLL for (int j = 0; j < kCount; ++j) {
    const int64_t block = first + j * step;
    l[j] = partials.l[block];
    m[j] = partials.m[block];
    UNROLL for (int i = 0; i < kOwn; ++i) parts[j * kOwn + i] = partials.o[block * D + place_of<D>(i, lane)];
  }
  UNROLL for (int j = 0; j < kCount; ++j) {
    const float factor = l[j] == 0.0f ? 0.0f : exp(m[j] - largest);
    sum = fma(factor, l[j], sum);
    UNROLL for (int i = 0; i < kOwn; ++i) values[i] = fma(factor, parts[j * kOwn + i], values[i]);
  }
}

template <typename T, int D>
[[kernel]] void aura_flash_p2(
    device const float* o_partials [[buffer(0)]],
    device const float* m_partials [[buffer(1)]],
    device const float* l_partials [[buffer(2)]],
    device const float* sinks [[buffer(3)]],
    device const float* signs [[buffer(4)]],
    device T* o [[buffer(5)]],
    constant MergeParameters& parameters [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int kLanes = lanes_of(D);
  constexpr int kOwn = D / kLanes;
  constexpr int kSimdgroups = kAuraThreads / 32;
  constexpr int kAtOnce = kOwn <= 4 ? 8 : kOwn == 8 ? 4 : 2;
  constexpr int kOfSimdgroup = (kOwn + 1) * 32;
  threadgroup float others[(kSimdgroups - 1) * kOfSimdgroup];  // the values and the sum of each lane

  const uint together = uint(parameters.together);
  const VectorPlace place =
      vector_place<D>(parameters.vectors, 0, (group.x * kSimdgroups + simdgroup) / together, lane);
  const int64_t first = place.index * parameters.blocks;
  const Partials partials{o_partials, m_partials, l_partials};

  float sink = -INFINITY;
  if (parameters.has_sinks != 0) sink = sinks[place.head];
  float largest = sink;
  for (int block = int(lane) % kLanes; block < parameters.blocks; block += kLanes) {
    largest = fmax(largest, m_partials[first + block]);
  }
  largest = max_over_lanes<D>(largest);

  float values[kOwn];
  UNROLL for (int i = 0; i < kOwn; ++i) values[i] = 0.0f;
  float sum = 0.0f;  // sum of exponentials
  const int coded_blocks = parameters.blocks - parameters.exact_blocks;
  const int64_t step = int64_t(together);
  int64_t block = simdgroup % together;
  for (; block + step * (kAtOnce - 1) < coded_blocks; block += step * kAtOnce) {
    add_blocks<D, kAtOnce>(values, sum, partials, first + block, step, largest, lane);
  }
  for (; block < coded_blocks; block += step) {
    add_blocks<D, 1>(values, sum, partials, first + block, step, largest, lane);
  }

  if (parameters.together > 1) {
    if (simdgroup > 0) {
      threadgroup float* own = others + (int(simdgroup) - 1) * kOfSimdgroup + int(lane);
      UNROLL for (int i = 0; i < kOwn; ++i) own[i * 32] = values[i];
      own[kOwn * 32] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup > 0) return;
    UNROLL for (int other = 0; other < kSimdgroups - 1; ++other) {
      threadgroup const float* theirs = others + other * kOfSimdgroup + int(lane);
      UNROLL for (int i = 0; i < kOwn; ++i) values[i] += theirs[i * 32];
      sum += theirs[kOwn * 32];
    }
  }
  if (parameters.has_sinks != 0) sum += exp(sink - largest);

  rotate<D, true>(values, signs, lane);
  const float factor = 1.0f / sqrt(float(D));
  UNROLL for (int i = 0; i < kOwn; ++i) values[i] *= factor;
  for (int exact = coded_blocks; exact < parameters.blocks; ++exact) {
    add_blocks<D, 1>(values, sum, partials, first + exact, 1, largest, lane);
  }
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // a row that saw no key has the result 0
  UNROLL for (int i = 0; i < kOwn; ++i) {
    if (place.present) o[place.index * D + place_of<D>(i, lane)] = T(values[i] * inverse);
  }
}
