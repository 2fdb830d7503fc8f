#include "ops/gdn/chunk_local_cumsum.h"

#include "cpu/common.h"
#include "cpu/define.h"

namespace torch_gdn {

namespace {

void run(const ChunkLocalCumsum<int64_t>& op, const Tensor& g_cumsum) {
  const auto& s = op.shape;
  const Tensor g_f32 = op.g.to(at::kFloat);
  const cpu::Rows in(g_f32), out(g_cumsum);
  const auto chunks = cpu::chunks_of(s, op.cu_seqlens);
  cpu::for_each_tile(chunks.size(), s.HV, [&](int64_t i, int64_t head) {
    double sum = 0;
    for (int64_t row = 0; row < chunks[i].length; ++row) {
      sum += cpu::clamped_log_decay(in.value(chunks[i].batch, chunks[i].first + row, head));
      const auto rounded = static_cast<float>(sum);
      out.write(chunks[i].batch, chunks[i].first + row, head, 0, 1, &rounded);
    }
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<ChunkLocalCumsum, &run>(m); }

}  // namespace torch_gdn
