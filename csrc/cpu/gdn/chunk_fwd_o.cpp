#include "ops/gdn/chunk_fwd_o.h"

#include <ATen/ops/baddbmm.h>

#include "cpu/common.h"
#include "cpu/define.h"

namespace torch_gdn {

namespace {

void run(const ChunkFwdO<int64_t>& op, const Tensor& o) {
  const auto& s = op.shape;
  const Tensor q_unit = unit_last_stride(op.q, "q"), k_unit = unit_last_stride(op.k, "k"),
               v_unit = unit_last_stride(op.v, "v");
  const cpu::Rows in_q(q_unit), in_k(k_unit), in_v(v_unit), in_g(op.g), out(o);
  const cpu::States in_h(op.h, op.state_v_first);
  const auto factor = static_cast<float>(scale_or_default(op.scale, s.K));

  cpu::for_each_group(cpu::chunks_of(s, op.cu_seqlens), s.HV, [&](std::span<const cpu::Chunk> chunks) {
    const int64_t rows = cpu::tile_rows(chunks), count = chunks.size(), tiles = count * s.HV, group = s.HV / s.H;
    const Tensor queries = cpu::f32_tiles(count * s.H, rows, s.K), keys = cpu::f32_tiles(count * s.H, rows, s.K);
    cpu::for_each_tile(count, s.H, [&](int64_t i, int64_t head) {
      in_q.read_tile(chunks[i], head, rows, cpu::tile(queries, i * s.H + head));
      in_k.read_tile(chunks[i], head, rows, cpu::tile(keys, i * s.H + head));
    });
    const Tensor products = at::bmm(queries, keys.transpose(1, 2));
    const Tensor decayed = cpu::f32_tiles(tiles, rows, s.K), scores = cpu::f32_tiles(tiles, rows, rows);
    const Tensor values = cpu::f32_tiles(tiles, rows, s.V), states = cpu::f32_tiles(tiles, s.K, s.V);
    cpu::for_each_tile(count, s.HV, [&](int64_t i, int64_t head) {
      const int64_t n = i * s.HV + head, key_tile = i * s.H + head / group;
      float g_cumsum[64], weights[64];
      cpu::read_values(in_g, chunks[i], head, rows, cpu::Below::kLast, g_cumsum);
      for (int64_t r = 0; r < rows; ++r) weights[r] = factor * std::exp(g_cumsum[r]);
      cpu::row_kernels().scale(cpu::tile(queries, key_tile), weights, rows, s.K, cpu::tile(decayed, n));
      const float* product = cpu::tile(products, key_tile);
      float* score = cpu::tile(scores, n);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c <= r; ++c) {
          score[r * rows + c] = factor * product[r * rows + c] * std::exp(g_cumsum[r] - g_cumsum[c]);
        }
        std::fill(score + r * rows + r + 1, score + (r + 1) * rows, 0.0f);
      }
      in_v.read_tile(chunks[i], head, rows, cpu::tile(values, n));
      in_h.read(chunks[i].batch, chunks[i].row, head, 0, s.V, cpu::tile(states, n), s.V);
    });
    const Tensor result = at::baddbmm(at::bmm(decayed, states), scores, values);
    cpu::for_each_tile(count, s.HV, [&](int64_t i, int64_t head) {
      out.write_tile(chunks[i], head, cpu::tile(result, i * s.HV + head));
    });
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<ChunkFwdO, &run>(m); }

}  // namespace torch_gdn
