#pragma once
#include "metal/layers/rows.h"
#include "ops/layers/qk_norm_rope.h"
#include "shaders/layers/rotation.h"

namespace torch_gdn {

// The operands and parameters of the kernels that rotate heads.
struct RotatedHeads {
  Tensor q, k, cos, sin;  // [B, T, H, D]; angles have one head
  optional<Tensor> q_weight, k_weight;
  Rotation rotation;

  // `argument` is its name in errors.
  RotatedHeads(const QkNormRope<int64_t>& op, const char* argument)
      : q(as_rows(op.q, "q")),
        k(as_rows(op.k, "k")),
        cos(as_rows(op.cos.unsqueeze(-2), "cos")),
        sin(as_rows(op.sin.unsqueeze(-2), "sin")),
        q_weight(contiguous(op.q_weight)),
        k_weight(contiguous(op.k_weight)) {
    rotation.cos = row_strides(cos), rotation.sin = row_strides(sin);
    rotation.D = int32_count(op.D, argument, "elements in a row");
    rotation.pairs = int32_t(op.P);
    rotation.eps = float(op.eps);
    rotation.has_norm = q_weight.has_value();
    rotation.zero_centered = op.zero_centered;
  }

  at::ScalarType weight_type() const { return q_weight.value_or(q).scalar_type(); }

  int width() const {
    for (const auto& weight : {q_weight, k_weight}) {
      if (weight.has_value() && weight->storage_offset() % 4 != 0) return 1;
    }
    return vector_width({q, k, cos, sin});
  }
};

}  // namespace torch_gdn
