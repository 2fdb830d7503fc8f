// A simdgroup owns 32 / lanes_of(D) vectors. A lane holds D / lanes_of(D) elements in registers, in f32. Threadgroup
// memory holds the centroids.
// Layout: codes [B, H, T, words], norms [B, H, T] f16, means of tiles [B, H, tiles, D] f16, all with strides; x
// [B, H, T, D], contiguous.
//     x = norm Pi^T centroids + mean, or with kRotated norm centroids + Pi mean
#include "aura/codes.h"
#include "aura/parameters.h"
#include "aura/rotation.h"

template <typename T, int code, int D, bool kRotated>
[[kernel]] void aura_decode(
    device const uint* codes [[buffer(0)]],
    device const half* norms [[buffer(1)]],
    device const float* codebook [[buffer(2)]],
    device const float* signs [[buffer(3)]],
    device const half* tile_means [[buffer(4)]],
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
  float added[kOwn];
  device const half* mean =
      tile_means + offset_of(parameters.tile_means, place.batch, place.head, place.token / kTokensOfTile);
  UNROLL for (int i = 0; i < kOwn; ++i) {
    values[i] = centroids[code_at<code, D>(words, place_of<D>(i, lane))];
    added[i] = parameters.has_tile_means != 0 ? float(mean[place_of<D>(i, lane)]) : 0.0f;
  }
  const float by_root = 1.0f / sqrt(float(D));
  if constexpr (kRotated) {
    rotate<D, false>(added, signs, lane);
  } else {
    rotate<D, true>(values, signs, lane);
  }
  const float norm = float(norms[offset_of(parameters.norms, place.batch, place.head, place.token)]);
  const float factor = kRotated ? norm : norm * by_root;
  const float share = kRotated ? by_root : 1.0f;
  UNROLL for (int i = 0; i < kOwn; ++i) {
    if (place.present) x[place.index * D + place_of<D>(i, lane)] = T(fma(values[i], factor, share * added[i]));
  }
}
