#include <torch/library.h>

#include "cpu/common.h"

namespace torch_gdn {
namespace {

Tensor chunk_local_cumsum(const Tensor& g, int64_t chunk_size, const optional<Tensor>& cu_seqlens,
                          const optional<Tensor>& chunk_indices) {
  const auto s = check_chunk_local_cumsum(g, chunk_size, cu_seqlens, chunk_indices);
  Tensor sums = at::empty({s.B, s.T, s.HV}, g.options().dtype(at::kFloat));
  const Tensor g_f32 = g.to(at::kFloat);
  const cpu::Rows in(g_f32), out(sums);
  const auto chunks = cpu::chunks_of(s, cu_seqlens);
  cpu::for_each_tile(chunks.size(), s.HV, [&](int64_t i, int64_t head) {
    double sum = 0;
    for (int64_t row = 0; row < chunks[i].length; ++row) {
      sum += cpu::clamp_decay(in.value(chunks[i].batch, chunks[i].first + row, head));
      const auto rounded = static_cast<float>(sum);
      out.write(chunks[i].batch, chunks[i].first + row, head, 0, 1, &rounded);
    }
  });
  return sums;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CPU, m) { m.impl("chunk_local_cumsum", &chunk_local_cumsum); }

}  // namespace torch_gdn
