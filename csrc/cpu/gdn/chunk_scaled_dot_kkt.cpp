#include "ops/gdn/chunk_scaled_dot_kkt.h"

#include "cpu/common.h"
#include "cpu/define.h"

namespace torch_gdn {

namespace {

void run(const ChunkScaledDotKkt<int64_t>& op, const Tensor& A) {
  const auto& s = op.shape;
  const Tensor k_unit = unit_last_stride(op.k, "k"), beta_f32 = op.beta.to(at::kFloat);
  const cpu::Rows in_k(k_unit), in_g(op.g), in_beta(beta_f32), out(A);

  cpu::for_each_group(cpu::chunks_of(s, op.cu_seqlens), s.HV, [&](std::span<const cpu::Chunk> chunks) {
    const int64_t rows = cpu::tile_rows(chunks), count = chunks.size();
    const Tensor keys = cpu::f32_tiles(count * s.H, rows, s.K);
    cpu::for_each_tile(count, s.H, [&](int64_t i, int64_t head) {
      in_k.read_tile(chunks[i], head, rows, cpu::tile(keys, i * s.H + head));
    });
    const Tensor products = at::bmm(keys, keys.transpose(1, 2));
    cpu::for_each_tile(count, s.HV, [&](int64_t i, int64_t head) {
      float g_cumsum[64], beta[64], row[64];
      cpu::read_values(in_g, chunks[i], head, rows, cpu::Below::kLast, g_cumsum);
      cpu::read_values(in_beta, chunks[i], head, rows, cpu::Below::kZero, beta);
      const float* product = cpu::tile(products, i * s.H + head / (s.HV / s.H));
      for (int64_t r = 0; r < chunks[i].length; ++r) {
        for (int64_t c = 0; c < r; ++c) row[c] = beta[r] * product[r * rows + c] * std::exp(g_cumsum[r] - g_cumsum[c]);
        std::fill(row + r, row + s.C, 0.0f);
        out.write(chunks[i].batch, chunks[i].first + r, head, 0, s.C, row);
      }
    });
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<ChunkScaledDotKkt, &run>(m); }

}  // namespace torch_gdn
