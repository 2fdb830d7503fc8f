#include <ATen/ops/baddbmm.h>
#include <torch/library.h>

#include "cpu/common.h"

namespace torch_gdn {
namespace {

Tensor chunk_fwd_o(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& h, const Tensor& g,
                   optional<double> scale, bool state_v_first, const optional<Tensor>& cu_seqlens, int64_t chunk_size,
                   const optional<Tensor>& chunk_indices) {
  const auto s = check_chunk_fwd_o(q, k, v, h, g, scale, state_v_first, cu_seqlens, chunk_size, chunk_indices);
  Tensor o = at::empty({s.B, s.T, s.HV, s.V}, q.options());
  const Tensor q_unit = unit_last_stride(q, "q"), k_unit = unit_last_stride(k, "k"), v_unit = unit_last_stride(v, "v");
  const cpu::Rows in_q(q_unit), in_k(k_unit), in_v(v_unit), in_g(g), out(o);
  const cpu::States in_h(h, state_v_first);
  const auto factor = static_cast<float>(scale_or_default(scale, s.K));

  cpu::for_each_group(cpu::chunks_of(s, cu_seqlens), s.HV, [&](std::span<const cpu::Chunk> chunks) {
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
      float sums[64], weights[64];
      cpu::read_values(in_g, chunks[i], head, rows, cpu::Below::kLast, sums);
      for (int64_t r = 0; r < rows; ++r) weights[r] = factor * std::exp(sums[r]);
      cpu::scale_rows(cpu::tile(queries, key_tile), weights, rows, s.K, cpu::tile(decayed, n));
      const float* product = cpu::tile(products, key_tile);
      float* score = cpu::tile(scores, n);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c <= r; ++c) {
          score[r * rows + c] = factor * product[r * rows + c] * std::exp(sums[r] - sums[c]);
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
  return o;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CPU, m) { m.impl("chunk_fwd_o", &chunk_fwd_o); }

}  // namespace torch_gdn
