// Multiplies queries with the means that were subtracted from the keys of a tile. A simdgroup owns one tile of one KV
// head and up to 32 query rows. It holds the tile's means in registers, and processes one row at a time. Lane l has
// columns l, l + 32, ...
// Layout: q [B, HQ, L, D] and means [B, HK, tiles, D] f16, with strides; scores [B, HQ, L, tiles] f32, contiguous.
//     scores = scale q . means
#include "aura/parameters.h"
#include "aura/visibility.h"

template <typename T, int D>
[[kernel]] void aura_tile_scores(
    device const T* q [[buffer(0)]],
    device const half* means [[buffer(1)]],
    device float* scores [[buffer(2)]],
    constant TileScoreParameters& parameters [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int kOwn = (D + 31) / 32;  // columns per lane
  const FlashTile own_rows = flash_tile<kTileScoreRows, D, D>(parameters, group);
  const int own_tile = int(group.x) * (kAuraThreads / 32) + int(simdgroup);
  const int tile = min(own_tile, parameters.tiles - 1);

  device const half* mean = means + offset_of(parameters.means, own_rows.batch, own_rows.kv_head, tile);
  float own[kOwn];
  UNROLL for (int i = 0; i < kOwn; ++i) {
    const int column = i * 32 + int(lane);
    own[i] = D % 32 == 0 || column < D ? float(mean[column]) : 0.0f;
  }
  for (int row = own_rows.first_row; row <= own_rows.last_row; ++row) {
    const RowPlace place = row_place(parameters, own_rows, row);
    device const T* query = q + offset_of(parameters.q, own_rows.batch, place.head, place.query);
    float sum = 0.0f;
    UNROLL for (int i = 0; i < kOwn; ++i) {
      const int column = i * 32 + int(lane);
      if (D % 32 == 0 || column < D) sum = fma(float(query[column]), own[i], sum);
    }
    sum = simd_sum(sum);
    if (lane == 0 && own_tile < parameters.tiles) {
      scores[place.index * parameters.tiles + tile] = sum * parameters.scale;
    }
  }
}
