#include <torch/library.h>

#include <cmath>

#include "cpu/aura/aura_flash.h"

namespace torch_gdn {
namespace {

constexpr int64_t kPieces = 32;  // of work, where there are keys enough: two for each core of a large desktop

struct Query {
  Tensor rotated, sums;  // [B, HQ, L, D], [B, HQ, L]: of scale * q
};

Query rotate_query(const AuraShape& s, const Tensor& q_any, const Tensor& signs_any, float scale) {
  const Tensor q = unit_last_stride(q_any, "q"), signs = signs_any.contiguous();
  const auto f32 = q.options().dtype(at::kFloat);
  Query query{at::empty({s.B, s.HQ, s.L, s.D}, f32), at::empty({s.B, s.HQ, s.L}, f32)};
  const cpu::Rows in(q), out(query.rotated);
  const float factor = scale / std::sqrt(static_cast<float>(s.D));
  at::parallel_for(0, s.B * s.HQ * s.L, 64, [&](int64_t begin, int64_t end) {
    std::vector<float> row(s.D);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / s.L / s.HQ, head = i / s.L % s.HQ, token = i % s.L;
      in.read(b, head, token, 0, s.D, row.data());
      double sum = 0;
      for (const float x : row) sum += x;
      query.sums.mutable_data_ptr<float>()[i] = static_cast<float>(sum * scale);
      cpu::rotate(row.data(), signs.const_data_ptr<float>(), s.D, false);
      for (float& x : row) x *= factor;
      out.write(b, head, token, 0, s.D, row.data());
    }
  });
  return query;
}

Tensor aura_attention(const Tensor& q, const Tensor& key_codes, const Tensor& key_norms, const Tensor& key_codebook,
                      const Tensor& key_signs, const Tensor& value_codes, const Tensor& value_norms,
                      const Tensor& value_codebook, const Tensor& value_signs, const optional<Tensor>& key_means,
                      const optional<Tensor>& value_means, const optional<Tensor>& starts,
                      const optional<Tensor>& sinks, optional<double> scale, bool causal, optional<int64_t> q_offset,
                      int64_t window, optional<int64_t> block_size) {
  auto s =
      check_aura_attention(q, key_codes, key_norms, key_codebook, key_signs, value_codes, value_norms, value_codebook,
                           value_signs, key_means, value_means, starts, sinks, causal, q_offset, window, block_size);
  const Tensor o = at::empty({s.B, s.HQ, s.L, s.D}, q.options());
  if (o.numel() == 0) return o;
  const int64_t groups = s.B * s.HK * ceil_div(s.L * s.HQ / s.HK, cpu::kRows);
  s.block_size = block_size.value_or(default_block_size(s.T, cpu::kTileKeys, groups, kPieces));
  s.NB = ceil_div(s.T, s.block_size);
  const cpu::Cache cache{unit_last_stride(key_codes, "key_codes"),
                         key_norms,
                         key_codebook,
                         unit_last_stride(value_codes, "value_codes"),
                         value_norms,
                         value_codebook,
                         key_means,
                         value_means};
  const auto query = rotate_query(s, q, key_signs, static_cast<float>(scale_or_default(scale, s.D)));
  const auto partials = cpu::new_partials(s, q, value_means.has_value());
  cpu::flash_p1(s, query.rotated, query.sums, cache, {starts, causal, window}, partials);
  cpu::flash_p2(s, partials, value_signs, sinks, o);
  return o;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CPU, m) { m.impl("aura_attention", &aura_attention); }

}  // namespace torch_gdn
