#include "ops/aura/aura_attention.h"

#include "metal/aura/launches.h"
#include "metal/implement.h"
#include "shaders/aura/aura_flash_exact.h"
#include "shaders/aura/aura_flash_p1.h"

namespace torch_gdn {

namespace {

void run(const AuraAttention<int64_t>& op, const Tensor& o) {
  const auto& s = op.shape;
  if (s.T + s.E == 0) {
    o.zero_();
    return;
  }
  const auto f32 = op.q.options().dtype(at::kFloat);
  const bool has_codes = s.T > 0;
  const Tensor q = unit_last_stride(op.q, "q"), q_rot = has_codes ? at::empty(q.sizes(), f32) : Tensor();
  optional<Tensor> tile_scores;
  if (has_codes && op.key.tile_means.has_value()) tile_scores = at::empty({s.B, s.HQ, s.L, tiles_of(s.T)}, f32);
  const int64_t row_tiles = ceil_div(s.L * s.HQ / s.HK, rows_of_threadgroup(s));
  const int64_t block_size =
      op.block_size.value_or(default_block_size(s.T, kFlashKeys, s.B * s.HK * row_tiles, busy_threadgroups()));
  const int64_t exact_tiles = s.B * s.HK * ceil_div(s.L * s.HQ / s.HK, kExactQueryRows);
  const int64_t exact_rows = default_block_size(s.E, kExactKeys, exact_tiles, busy_threadgroups());
  const auto pass_1 = op.pass_1(q_rot, tile_scores, block_size, exact_rows);
  const auto partials = pass_1.partials(f32);
  c10::SmallVector<Launch, 5> launches;
  if (has_codes) {
    launches.push_back(launch_aura_rotate({q, op.key_signs, scale_or_default(op.scale, s.D), false}, q_rot));
    if (tile_scores.has_value()) launches.push_back(launch_aura_tile_scores(op, *tile_scores));
    launches.push_back(launch_aura_flash_p1(pass_1, partials));
  }
  if (s.E > 0) launches.push_back(launch_aura_flash_exact(op, pass_1.shape, exact_rows, partials));
  launches.push_back(launch_aura_flash_p2(op.pass_2(pass_1, partials), o));
  launcher().run(launches);
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<AuraAttention, &run>(m); }

}  // namespace torch_gdn
