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

// Returns scale q . means, [B, HQ, L, tiles]. A work item has some tiles of one KV head and some rows of q that read
// them.
optional<Tensor> tile_scores(const AuraAttention<int64_t>& op) {
  const auto& s = op.shape;
  if (!op.key.tile_means.has_value()) return std::nullopt;
  constexpr int64_t kRows = cpu::kFlashRows, kTiles = cpu::kTileKeys;
  const Tensor q = unit_last_stride(op.q, "q"), means = unit_last_stride(*op.key.tile_means, "key_tile_means");
  const int64_t ratio = s.HQ / s.HK, tiles = tiles_of(s.T);
  const Tensor scores = at::empty({s.B, s.HQ, s.L, tiles}, q.options().dtype(at::kFloat));
  const cpu::Rows query_rows(q), mean_rows(means), out(scores);
  const float scale = static_cast<float>(scale_or_default(op.scale, s.D));
  const int64_t row_parts = ceil_div(s.L * ratio, kRows), tile_parts = ceil_div(tiles, kTiles);
  at::parallel_for(0, s.B * s.HK * tile_parts * row_parts, 4, [&](int64_t begin, int64_t end) {
    std::vector<float> memory((kRows + kTiles) * s.D);
    float *queries = memory.data(), *vectors = queries + kRows * s.D, products[kRows * kTiles];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / row_parts / tile_parts / s.HK, hk = i / row_parts / tile_parts % s.HK;
      const int64_t first_row = i % row_parts * kRows, rows = std::min(kRows, s.L * ratio - first_row);
      const int64_t first = i / row_parts % tile_parts * kTiles, count = std::min(kTiles, tiles - first);
      for (int64_t t = 0; t < count; ++t) mean_rows.read(b, hk, first + t, 0, s.D, vectors + t * s.D);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t head = hk * ratio + (first_row + r) % ratio;
        query_rows.read(b, head, (first_row + r) / ratio, 0, s.D, queries + r * s.D);
      }
      cpu::aura_kernels().dot_products(
          {.q = queries, .keys = vectors, .rows = rows, .count = count, .width = s.D, .scores = products});
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t head = hk * ratio + (first_row + r) % ratio;
        for (int64_t t = 0; t < count; ++t) products[r * kTiles + t] *= scale;
        out.write(b, head, (first_row + r) / ratio, first, count, products + r * kTiles);
      }
    }
  });
  return scores;
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
