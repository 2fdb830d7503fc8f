// A simdgroup owns 32 / lanes_of(D) vectors. A lane holds D / lanes_of(D) elements in registers, in f32. Threadgroup
// memory holds the centroids. Layout: codes [B, H, T, words], norms (f16) and means [B, H, T] with strides, x [B, H, T,
// D] contiguous.
// x = norm Pi^T centroids + mean, or (rotated) norm centroids + mean Pi 1.
#include "aura/aura_decode.h"
#include "aura/codes.h"
#include "aura/rotation.h"

template <typename T, int code, int D, bool kRotated>
[[kernel]] void aura_decode(
    device const uint* codes [[buffer(0)]],
    device const half* norms [[buffer(1)]],
    device const float* codebook [[buffer(2)]],
    device const float* signs [[buffer(3)]],
    device const float* means [[buffer(4)]],
    device T* x [[buffer(5)]],
    constant DecodeParameters& parameters [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int kEntries = entries_of(code);
  constexpr int kOwn = D / lanes_of(D);
  threadgroup float centroids[kEntries];
  stage_table(centroids, codebook, kEntries, thread_index, kAuraThreads);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const VectorPlace place = vector_place<D>(parameters.vectors, group.x, simdgroup, lane);
  device const uint* words = codes + offset_of(parameters.codes, place.batch, place.head, place.token);
  float values[kOwn];
  float ones[kOwn];  // factors of a mean
  UNROLL for (int i = 0; i < kOwn; ++i) {
    values[i] = centroids[code_at<code, D>(words, place_of<D>(i, lane))];
    ones[i] = 1.0f;
  }
  const float root = sqrt(float(D));
  if constexpr (kRotated) {
    rotate<D, false>(ones, signs, lane);
  } else {
    rotate<D, true>(values, signs, lane);
  }
  const float norm = float(norms[offset_of(parameters.norms, place.batch, place.head, place.token)]);
  float mean = 0.0f;
  if (parameters.has_means != 0) mean = means[offset_of(parameters.means, place.batch, place.head, place.token)];
  const float factor = kRotated ? norm : norm / root;
  const float share = kRotated ? mean / root : mean;
  UNROLL for (int i = 0; i < kOwn; ++i) {
    if (place.present) x[place.index * D + place_of<D>(i, lane)] = T(fma(values[i], factor, share * ones[i]));
  }
}
