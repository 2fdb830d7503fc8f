#include "ops/layers/qk_norm_rope.h"

#include "metal/implement.h"
#include "metal/layers/rotated_heads.h"
#include "shaders/layers/qk_norm_rope.h"

namespace torch_gdn {

namespace {

// Returns the strides of an output, viewed as [B, T, H, D].
RowStrides output_strides(const Tensor& x, bool heads_first) {
  return row_strides(heads_first ? x.transpose(1, 2) : x);
}

void run(const QkNormRope<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [q_out, k_out] = outputs;
  if (q_out.numel() + k_out.numel() == 0) return;
  const char* q = "qk_norm_rope: q";
  const RotatedHeads in(op, q);
  QkNormRopeParameters parameters{};
  parameters.heads = int32_t(in.q.size(2) + in.k.size(2));
  parameters.rows = int32_count(op.B * op.T * parameters.heads, q, "rows");
  parameters.tokens = int32_t(op.T);
  parameters.q_heads = int32_t(in.q.size(2));
  parameters.q = row_strides(in.q), parameters.k = row_strides(in.k);
  parameters.q_out = output_strides(q_out, op.heads_first), parameters.k_out = output_strides(k_out, op.heads_first);
  parameters.rotation = in.rotation;
  launcher().run({{"layers/qk_norm_rope",
                   {in.q.scalar_type(), in.weight_type(), in.cos.scalar_type(), in.width()},
                   {in.q, in.k, in.cos, in.sin, in.q_weight, in.k_weight, q_out, k_out, parameters},
                   {ceil_div(parameters.rows, kRotatedRows), 1, 1},
                   32 * kRotatedRows}});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<QkNormRope, &run>(m); }

}  // namespace torch_gdn
