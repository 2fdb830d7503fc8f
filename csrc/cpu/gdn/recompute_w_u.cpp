#include <torch/library.h>

#include "cpu/common.h"

namespace torch_gdn {
namespace {

std::tuple<Tensor, Tensor> recompute_w_u(const Tensor& k, const Tensor& v, const Tensor& beta, const Tensor& A,
                                         const Tensor& g, const optional<Tensor>& cu_seqlens,
                                         const optional<Tensor>& chunk_indices) {
  const auto s = check_recompute_w_u(k, v, beta, A, g, cu_seqlens, chunk_indices);
  Tensor w = at::empty({s.B, s.T, s.HV, s.K}, k.options()), u = at::empty({s.B, s.T, s.HV, s.V}, k.options());
  const Tensor k_unit = unit_last_stride(k, "k"), v_unit = unit_last_stride(v, "v"), A_unit = unit_last_stride(A, "A");
  const Tensor beta_f32 = beta.to(at::kFloat);
  const cpu::Rows in_k(k_unit), in_v(v_unit), in_A(A_unit), in_beta(beta_f32), in_g(g), out_w(w), out_u(u);

  cpu::for_each_group(cpu::chunks_of(s, cu_seqlens), s.HV, [&](std::span<const cpu::Chunk> chunks) {
    const int64_t rows = cpu::tile_rows(chunks), count = chunks.size(), tiles = count * s.HV;
    const Tensor inverse = cpu::f32_tiles(tiles, rows, rows);
    const Tensor keys = cpu::f32_tiles(tiles, rows, s.K), values = cpu::f32_tiles(tiles, rows, s.V);
    cpu::for_each_tile(count, s.HV, [&](int64_t i, int64_t head) {
      const int64_t n = i * s.HV + head;
      float sums[64], steps[64], weights[64];
      cpu::read_values(in_g, chunks[i], head, rows, cpu::Below::kLast, sums);
      cpu::read_values(in_beta, chunks[i], head, rows, cpu::Below::kZero, steps);
      for (int64_t r = 0; r < rows; ++r) weights[r] = steps[r] * std::exp(sums[r]);
      in_k.read_tile(chunks[i], head / (s.HV / s.H), rows, cpu::tile(keys, n));
      cpu::scale_rows(cpu::tile(keys, n), weights, rows, s.K, cpu::tile(keys, n));
      in_v.read_tile(chunks[i], head, rows, cpu::tile(values, n));
      cpu::scale_rows(cpu::tile(values, n), steps, rows, s.V, cpu::tile(values, n));
      in_A.read_square(chunks[i], head, rows, cpu::tile(inverse, n));
    });
    const Tensor w_tiles = at::bmm(inverse, keys), u_tiles = at::bmm(inverse, values);
    cpu::for_each_tile(count, s.HV, [&](int64_t i, int64_t head) {
      out_w.write_tile(chunks[i], head, cpu::tile(w_tiles, i * s.HV + head));
      out_u.write_tile(chunks[i], head, cpu::tile(u_tiles, i * s.HV + head));
    });
  });
  return {w, u};
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CPU, m) { m.impl("recompute_w_u", &recompute_w_u); }

}  // namespace torch_gdn
