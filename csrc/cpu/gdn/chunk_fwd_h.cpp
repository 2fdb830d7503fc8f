#include "ops/gdn/chunk_fwd_h.h"

#include <ATen/ops/baddbmm.h>

#include "cpu/common.h"
#include "cpu/define.h"

namespace torch_gdn {

namespace {

void run(const ChunkFwdH<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto& s = op.shape;
  const auto& [h, v_new, final_state] = outputs;
  h.zero_();  // surplus rows
  const auto state_io = cpu::StateIo::per_sequence(s, op.initial_state, final_state, op.state_v_first);
  const Tensor k_unit = unit_last_stride(op.k, "k"), w_unit = unit_last_stride(op.w, "w"),
               u_unit = unit_last_stride(op.u, "u");
  const cpu::Rows in_k(k_unit), in_w(w_unit), in_u(u_unit), in_g(op.g), out_v(v_new);
  const cpu::States out_h(h, op.state_v_first);

  for (const cpu::Block& block : cpu::blocks_of(s, op.cu_seqlens)) {
    const Tensor state = cpu::initial_states(s, block, state_io);
    cpu::for_each_steps(block, s.HV, [&](int64_t first_step, int64_t last_step) {
      const auto chunks = cpu::chunks_of_steps(block, first_step, last_step);
      const int64_t rows = cpu::tile_rows(chunks), tiles = chunks.size() * s.HV;
      const Tensor keys = cpu::f32_tiles(tiles, rows, s.K), w_tiles = cpu::f32_tiles(tiles, rows, s.K);
      const Tensor u_tiles = cpu::f32_tiles(tiles, rows, s.V), decay = cpu::f32_tiles(tiles, 1, 1);
      cpu::for_each_tile(chunks.size(), s.HV, [&](int64_t i, int64_t head) {
        const int64_t n = i * s.HV + head;
        float g_cumsum[64], remaining[64];
        cpu::read_values(in_g, chunks[i], head, rows, cpu::Below::kLast, g_cumsum);
        for (int64_t r = 0; r < rows; ++r) remaining[r] = std::exp(g_cumsum[rows - 1] - g_cumsum[r]);
        *cpu::tile(decay, n) = std::exp(g_cumsum[rows - 1]);
        in_k.read_tile(chunks[i], head / (s.HV / s.H), rows, cpu::tile(keys, n));
        cpu::row_kernels().scale(cpu::tile(keys, n), remaining, rows, s.K, cpu::tile(keys, n));
        in_w.read_tile(chunks[i], head, rows, cpu::tile(w_tiles, n));
        in_u.read_tile(chunks[i], head, rows, cpu::tile(u_tiles, n));
      });
      for (int64_t step = first_step; step < last_step; ++step) {
        const int64_t begin = block.steps[step] - block.steps[first_step];
        const int64_t count = block.steps[step + 1] - block.steps[step];
        const auto now = [&](const Tensor& all) { return all.narrow(0, begin * s.HV, count * s.HV); };
        const Tensor before = state.narrow(0, 0, count * s.HV);
        const Tensor values = at::baddbmm(now(u_tiles), now(w_tiles), before, 1, -1);
        cpu::for_each_tile(count, s.HV, [&](int64_t i, int64_t head) {
          const auto& chunk = chunks[begin + i];
          const int64_t n = i * s.HV + head;
          out_h.write(chunk.batch, chunk.row, head, 0, s.V, cpu::tile(before, n), s.V);
          out_v.write_tile(chunk, head, cpu::tile(values, n));
        });
        before.mul_(now(decay)).baddbmm_(now(keys).transpose(1, 2), values);
      }
    });
    cpu::write_final_states(s, block, state, state_io);
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<ChunkFwdH, &run>(m); }

}  // namespace torch_gdn
