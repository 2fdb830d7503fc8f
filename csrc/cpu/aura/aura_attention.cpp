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

struct RotatedQuery {
  Tensor q;               // [B, HQ, L, D]: scale Pi q
  optional<Tensor> sums;  // [B, HQ, L]: scale times the sums of q, if keys have means
};

// Returns the products of queries with the means of tiles, [B, HQ, L, tiles], scaled.
optional<Tensor> tile_scores(const AuraAttention<int64_t>& op) {
  const auto& s = op.shape;
  if (!op.key.tile_means.has_value()) return std::nullopt;
  const Tensor means = op.key.tile_means->narrow(2, 0, tiles_of(s.T)).to(at::kFloat);
  const Tensor q = op.q.to(at::kFloat).reshape({s.B, s.HK, s.HQ / s.HK * s.L, s.D});
  return q.matmul(means.mT()).mul_(scale_or_default(op.scale, s.D)).view({s.B, s.HQ, s.L, means.size(2)});
}

RotatedQuery rotate_query(const AuraAttention<int64_t>& op) {
  const auto& s = op.shape;
  const Tensor q = unit_last_stride(op.q, "q"), signs = op.key_signs.contiguous();
  const auto f32 = q.options().dtype(at::kFloat);
  RotatedQuery rotated{at::empty({s.B, s.HQ, s.L, s.D}, f32), std::nullopt};
  if (op.key.means.has_value()) rotated.sums = at::empty({s.B, s.HQ, s.L}, f32);
  const cpu::Rows in(q), out(rotated.q);
  const auto scale = static_cast<float>(scale_or_default(op.scale, s.D));
  const float factor = scale / std::sqrt(static_cast<float>(s.D));
  cpu::for_each_vector(q, [&](int64_t b, int64_t head, int64_t token) {
    float row[cpu::kLargestD];
    in.read(b, head, token, 0, s.D, row);
    if (rotated.sums.has_value()) {
      double sum = 0;
      for (int64_t d = 0; d < s.D; ++d) sum += row[d];
      cpu::set_value(*rotated.sums, b, head, token, static_cast<float>(sum * scale));
    }
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
  const auto rotated = rotate_query(op);
  const int64_t exact_rows = default_block_size(s.E, cpu::kTileKeys, groups, kWorkItems);
  const auto pass_1 = op.pass_1(rotated.q, rotated.sums, tile_scores(op), block_size, exact_rows);
  const auto partials = pass_1.partials(rotated.q.options());
  cpu::flash_p1(pass_1, partials);
  cpu::attend_to_exact_rows(op, pass_1.shape, exact_rows, partials);
  cpu::flash_p2(op.pass_2(pass_1, partials), o);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<AuraAttention, &run>(m); }

}  // namespace torch_gdn
