#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "metal/aura/aura_flash.h"

namespace torch_gdn {

namespace {

constexpr int64_t kTileKeys = 128;  // a thread of pass 1 in vector form takes one
constexpr int64_t kGroups = 256;    // that pass 1 should have, where there are keys enough: 3 or more for each GPU core

Tensor aura_attention(const Tensor& q_any, const Tensor& key_codes, const Tensor& key_norms, const Tensor& key_codebook,
                      const Tensor& key_signs, const Tensor& value_codes, const Tensor& value_norms,
                      const Tensor& value_codebook, const Tensor& value_signs, const optional<Tensor>& key_means,
                      const optional<Tensor>& value_means, const optional<Tensor>& starts,
                      const optional<Tensor>& sinks, optional<double> scale, bool causal, optional<int64_t> q_offset,
                      int64_t window, optional<int64_t> block_size) {
  auto shape = check_aura_attention(q_any, key_codes, key_norms, key_codebook, key_signs, value_codes, value_norms,
                                    value_codebook, value_signs, key_means, value_means, starts, sinks, causal,
                                    q_offset, window, block_size);
  const auto q = unit_last_stride(q_any, "q");
  const auto o = at::empty({shape.B, shape.HQ, shape.L, shape.D}, q.options());
  if (shape.T == 0) return o.zero_();
  const int64_t row_tiles = ceil_div(shape.L * shape.HQ / shape.HK, rows_together(shape));
  shape.block_size =
      block_size.value_or(default_block_size(shape.T, kTileKeys, shape.B * shape.HK * row_tiles, kGroups));
  shape.NB = ceil_div(shape.T, shape.block_size);
  const Cache cache{unit_last_stride(key_codes, "key_codes"),
                    key_norms,
                    key_codebook,
                    unit_last_stride(value_codes, "value_codes"),
                    value_norms,
                    value_codebook,
                    key_means,
                    value_means};
  const auto f32 = q.options().dtype(at::kFloat);
  const auto q_rot = at::empty(q.sizes(), f32);
  const auto q_sums =
      key_means.has_value() ? optional<Tensor>(at::empty({shape.B, shape.HQ, shape.L}, f32)) : std::nullopt;
  const auto partials = new_partials(shape, q, value_means.has_value());
  launcher().run({launch_aura_rotate(q, key_signs, scale_or_default(scale, shape.D), false, q_rot, q_sums),
                  launch_aura_flash_p1(shape, q_rot, q_sums, cache, {starts, causal, window}, partials),
                  launch_aura_flash_p2(shape, partials, value_signs, sinks, o)});
  return o;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { m.impl("aura_attention", aura_attention); }

}  // namespace torch_gdn
