#include "ops/attention/qk_norm_rope_and_cache.h"

#include "metal/attention/slots.h"
#include "metal/implement.h"
#include "metal/layers/rotated_heads.h"
#include "shaders/attention/qk_norm_rope_and_cache.h"

namespace torch_gdn {

namespace {

void run(const QkNormRopeAndCache<int64_t>& op, const Tensor& q_out) {
  if (op.q.numel() + op.k.numel() + op.v.numel() == 0) return;
  const char* q = "qk_norm_rope_and_cache_: q";
  const RotatedHeads in(op.heads, q);
  const Tensor v = as_rows(op.v, "v");
  QkNormRopeAndCacheParameters parameters{};
  parameters.heads = int32_t(in.q.size(2) + 2 * op.HK);
  parameters.rows = int32_count(op.heads.B * op.heads.T * parameters.heads, q, "rows");
  parameters.tokens = int32_t(op.heads.T);
  parameters.q_heads = int32_t(in.q.size(2));
  parameters.kv_heads = int32_t(op.HK);
  parameters.value_size = int32_count(op.DV, "qk_norm_rope_and_cache_: v", "elements in a row");
  parameters.q = row_strides(in.q), parameters.k = row_strides(in.k), parameters.v = row_strides(v);
  parameters.q_out = row_strides(q_out);
  parameters.rotation = in.rotation;
  parameters.slots = slot_parameters(op.slots, "qk_norm_rope_and_cache_: key_cache");
  parameters.op = op_name();
  const int width = std::min(in.width(), vector_width({v, op.key_cache, op.value_cache}));
  launcher().run({{"attention/qk_norm_rope_and_cache",
                   {in.q.scalar_type(), op.key_cache.scalar_type(), in.weight_type(), in.cos.scalar_type(), width},
                   {in.q, in.k, v, in.cos, in.sin, in.q_weight, in.k_weight, q_out, op.key_cache, op.value_cache,
                    op.slot_mapping, Binding::error_log(), parameters},
                   {ceil_div(parameters.rows, kRotatedRows), 1, 1},
                   32 * kRotatedRows}});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<QkNormRopeAndCache, &run>(m); }

}  // namespace torch_gdn
