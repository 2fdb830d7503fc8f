#include "ops/aura/aura_attention.h"

#include <cmath>

#include "cpu/aura/aura_flash.h"
#include "cpu/aura/rotation.h"
#include "cpu/aura/vectors.h"
#include "cpu/define.h"
#include "cpu/simd/aura_kernels.h"

namespace torch_gdn {

namespace {

constexpr int64_t kWorkItems = 32;  // if there are enough keys: two for each core of a large desktop

// Returns the products of queries with the means of tiles, [B, HQ, L, tiles], scaled.
optional<Tensor> tile_scores(const AuraAttention<int64_t>& op) {
  const auto& s = op.shape;
  if (!op.key.tile_means.has_value()) return std::nullopt;
  const Tensor means = op.key.tile_means->narrow(2, 0, tiles_of(s.T)).to(at::kFloat);
  const Tensor q = op.q.to(at::kFloat).reshape({s.B, s.HK, s.HQ / s.HK * s.L, s.D});
  return q.matmul(means.mT()).mul_(scale_or_default(op.scale, s.D)).view({s.B, s.HQ, s.L, means.size(2)});
}

// Returns scale Pi q, [B, HQ, L, D].
Tensor rotate_query(const AuraAttention<int64_t>& op) {
  const auto& s = op.shape;
  const Tensor q = unit_last_stride(op.q, "q"), signs = op.key_signs.contiguous();
  const Tensor rotated = at::empty({s.B, s.HQ, s.L, s.D}, q.options().dtype(at::kFloat));
  const cpu::Rows in(q), out(rotated);
  const float factor = static_cast<float>(scale_or_default(op.scale, s.D)) / std::sqrt(static_cast<float>(s.D));
  cpu::for_each_vector(q, [&](int64_t b, int64_t head, int64_t token) {
    float row[cpu::kLargestD];
    in.read(b, head, token, 0, s.D, row);
    cpu::rotate(row, signs.const_data_ptr<float>(), s.D, false);
    for (int64_t d = 0; d < s.D; ++d) row[d] *= factor;
    out.write(b, head, token, 0, s.D, row);
  });
  return rotated;
}

void run(const AuraAttention<int64_t>& op, const Tensor& o) {
  if (o.numel() == 0) return;
  const auto& s = op.shape;
  const int64_t groups = s.B * s.HK * ceil_div(s.L * s.HQ / s.HK, cpu::kFlashRows);
  const int64_t block_size = op.block_size.value_or(default_block_size(s.T, cpu::kTileKeys, groups, kWorkItems));
  const Tensor q_rot = rotate_query(op);
  const int64_t exact_rows = default_block_size(s.E, cpu::kTileKeys, groups, kWorkItems);
  const auto pass_1 = op.pass_1(q_rot, tile_scores(op), block_size, exact_rows);
  const auto partials = pass_1.partials(q_rot.options());
  cpu::flash_p1(pass_1, partials);
  cpu::attend_to_exact_rows(op, pass_1.shape, exact_rows, partials);
  cpu::flash_p2(op.pass_2(pass_1, partials), o);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<AuraAttention, &run>(m); }

}  // namespace torch_gdn
