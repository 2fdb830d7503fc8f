#include "ops/layers/qk_norm_rope.h"

#include "metal/implement.h"
#include "metal/layers/rows.h"
#include "shaders/layers/qk_norm_rope.h"

namespace torch_gdn {

namespace {

// Returns cos or sin as rows [B, T, 1, P].
Tensor angles(const Tensor& x, const char* name) { return as_rows(x.unsqueeze(-2), name); }

// Returns the strides of an output as [B, T, H, D].
RowStrides output_strides(const Tensor& x, bool heads_first) {
  return row_strides(heads_first ? x.transpose(1, 2) : x);
}

int width_of(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, const optional<Tensor>& q_weight,
             const optional<Tensor>& k_weight) {
  for (const auto& weight : {q_weight, k_weight}) {
    if (weight.has_value() && weight->storage_offset() % 4 != 0) return 1;
  }
  return vector_width({q, k, cos, sin});
}

void run(const QkNormRope<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [q_out, k_out] = outputs;
  if (q_out.numel() + k_out.numel() == 0) return;
  const Tensor q = as_rows(op.q, "q"), k = as_rows(op.k, "k"), cos = angles(op.cos, "cos"), sin = angles(op.sin, "sin");
  const auto q_weight = contiguous(op.q_weight), k_weight = contiguous(op.k_weight);
  QkNormRopeParameters parameters{};
  parameters.heads = int32_t(q.size(2) + k.size(2));
  parameters.rows = int32_count(q.size(0) * q.size(1) * parameters.heads, "qk_norm_rope: q", "rows");
  parameters.tokens = int32_t(q.size(1));
  parameters.q_heads = int32_t(q.size(2));
  parameters.D = int32_count(op.D, "qk_norm_rope: q", "elements in a row");
  parameters.pairs = int32_t(op.P);
  parameters.x = row_strides(q), parameters.k = row_strides(k);
  parameters.q_out = output_strides(q_out, op.heads_first), parameters.k_out = output_strides(k_out, op.heads_first);
  parameters.cos = row_strides(cos), parameters.sin = row_strides(sin);
  parameters.eps = float(op.eps);
  parameters.has_norm = q_weight.has_value();
  parameters.zero_centered = op.zero_centered;
  launcher().run({{"qk_norm_rope",
                   "layers/qk_norm_rope.metal",
                   {q.scalar_type(), q_weight.value_or(q).scalar_type(), cos.scalar_type(),
                    width_of(q, k, cos, sin, q_weight, k_weight)},
                   {q, k, cos, sin, q_weight, k_weight, q_out, k_out, Binding::values(parameters)},
                   {size_t(ceil_div(parameters.rows, kQkNormRopeRows)), 1, 1},
                   32 * kQkNormRopeRows}});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<QkNormRope, &run>(m); }

}  // namespace torch_gdn
