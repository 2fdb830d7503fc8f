#include "ops/gdn/recompute_w_u.h"

#include "cpu/common.h"
#include "cpu/define.h"

namespace torch_gdn {

namespace {

void run(const RecomputeWU<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& s = op.shape;
  const auto& [w, u] = outputs;
  const Tensor k_unit = unit_last_stride(op.k, "k"), v_unit = unit_last_stride(op.v, "v"),
               A_unit = unit_last_stride(op.A, "A");
  const Tensor beta_f32 = op.beta.to(at::kFloat);
  const cpu::Rows in_k(k_unit), in_v(v_unit), in_A(A_unit), in_beta(beta_f32), in_g(op.g), out_w(w), out_u(u);

  cpu::for_each_group(cpu::chunks_of(s, op.cu_seqlens), s.HV, [&](std::span<const cpu::Chunk> chunks) {
    const int64_t rows = cpu::tile_rows(chunks), count = chunks.size(), tiles = count * s.HV;
    const Tensor inverse = cpu::f32_tiles(tiles, rows, rows);
    const Tensor keys = cpu::f32_tiles(tiles, rows, s.K), values = cpu::f32_tiles(tiles, rows, s.V);
    cpu::for_each_tile(count, s.HV, [&](int64_t i, int64_t head) {
      const int64_t n = i * s.HV + head;
      float g_cumsum[64], beta[64], weights[64];
      cpu::read_values(in_g, chunks[i], head, rows, cpu::Below::kLast, g_cumsum);
      cpu::read_values(in_beta, chunks[i], head, rows, cpu::Below::kZero, beta);
      for (int64_t r = 0; r < rows; ++r) weights[r] = beta[r] * std::exp(g_cumsum[r]);
      in_k.read_tile(chunks[i], head / (s.HV / s.H), rows, cpu::tile(keys, n));
      cpu::row_kernels().scale(cpu::tile(keys, n), weights, rows, s.K, cpu::tile(keys, n));
      in_v.read_tile(chunks[i], head, rows, cpu::tile(values, n));
      cpu::row_kernels().scale(cpu::tile(values, n), beta, rows, s.V, cpu::tile(values, n));
      in_A.read_lower(chunks[i], head, rows, cpu::tile(inverse, n));
    });
    const Tensor w_tiles = at::bmm(inverse, keys), u_tiles = at::bmm(inverse, values);
    cpu::for_each_tile(count, s.HV, [&](int64_t i, int64_t head) {
      out_w.write_tile(chunks[i], head, cpu::tile(w_tiles, i * s.HV + head));
      out_u.write_tile(chunks[i], head, cpu::tile(u_tiles, i * s.HV + head));
    });
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<RecomputeWU, &run>(m); }

}  // namespace torch_gdn
