#include <torch/library.h>

#include "cpu/common.h"

namespace torch_gdn {
namespace {

Tensor chunk_scaled_dot_kkt(const Tensor& k, const Tensor& g, const Tensor& beta, const optional<Tensor>& cu_seqlens,
                            int64_t chunk_size, const optional<Tensor>& chunk_indices) {
  const auto s = check_chunk_scaled_dot_kkt(k, g, beta, cu_seqlens, chunk_size, chunk_indices);
  Tensor A = at::empty({s.B, s.T, s.HV, s.C}, k.options().dtype(at::kFloat));
  const Tensor k_unit = unit_last_stride(k, "k"), beta_f32 = beta.to(at::kFloat);
  const cpu::Rows in_k(k_unit), in_g(g), in_beta(beta_f32), out(A);

  cpu::for_each_group(cpu::chunks_of(s, cu_seqlens), s.HV, [&](std::span<const cpu::Chunk> chunks) {
    const int64_t rows = cpu::tile_rows(chunks), count = chunks.size();
    const Tensor keys = cpu::f32_tiles(count * s.H, rows, s.K);
    cpu::for_each_tile(count, s.H, [&](int64_t i, int64_t head) {
      in_k.read_tile(chunks[i], head, rows, cpu::tile(keys, i * s.H + head));
    });
    const Tensor products = at::bmm(keys, keys.transpose(1, 2));
    cpu::for_each_tile(count, s.HV, [&](int64_t i, int64_t head) {
      float sums[64], steps[64], row[64];
      cpu::read_values(in_g, chunks[i], head, rows, cpu::Below::kLast, sums);
      cpu::read_values(in_beta, chunks[i], head, rows, cpu::Below::kZero, steps);
      const float* product = cpu::tile(products, i * s.H + head / (s.HV / s.H));
      for (int64_t r = 0; r < chunks[i].length; ++r) {
        for (int64_t c = 0; c < r; ++c) row[c] = steps[r] * product[r * rows + c] * std::exp(sums[r] - sums[c]);
        std::fill(row + r, row + s.C, 0.0f);
        out.write(chunks[i].batch, chunks[i].first + r, head, 0, s.C, row);
      }
    });
  });
  return A;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CPU, m) { m.impl("chunk_scaled_dot_kkt", &chunk_scaled_dot_kkt); }

}  // namespace torch_gdn
