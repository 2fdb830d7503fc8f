#include "shaders/aura/aura_tile_scores.h"

#include "metal/aura/launches.h"
#include "metal/aura/vectors.h"

namespace torch_gdn {

Launch launch_aura_tile_scores(const AuraAttention<int64_t>& op, const Tensor& scores) {
  const auto& s = op.shape;
  const Tensor q = unit_last_stride(op.q, "q"), means = unit_last_stride(*op.key.tile_means, "key_tile_means");
  const int64_t tiles = scores.size(3);
  TileScoreParameters parameters{};
  parameters.q = vector_strides(q);
  parameters.means = vector_strides(means);
  set_query_rows(parameters, s);
  parameters.tiles = int32_t(tiles);
  parameters.scale = float(scale_or_default(op.scale, s.D));
  return {"aura/aura_tile_scores",
          {q.scalar_type(), s.D},
          {q, means, scores, parameters},
          {ceil_div(tiles, kAuraThreads / 32), s.HK * ceil_div(parameters.rows, kTileScoreRows), s.B},
          kAuraThreads};
}

}  // namespace torch_gdn
