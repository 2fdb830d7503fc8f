// What the ops on rows share, and their launches that other ops make.
#pragma once
#include "metal/parameters.h"
#include "ops/layers/rows.h"
#include "shaders/layers/parameters.h"

namespace torch_gdn {

// Returns x as [B, T, H, D] with a last stride of 1. A tensor with more dimensions is made contiguous.
inline Tensor as_rows(const Tensor& x, const char* name) {
  Tensor rows = unit_last_stride(x, name);
  while (rows.dim() < 4) rows = rows.unsqueeze(0);
  return rows.dim() > 4 ? as_contiguous(rows, name).view({1, -1, 1, rows.size(-1)}) : rows;
}

// Returns the grid of a kernel whose rows are those of x [B, T, heads, D].
template <typename Parameters>
Parameters row_parameters(const Tensor& x, const char* argument) {
  Parameters parameters{};
  parameters.rows = int32_count(x.size(0) * x.size(1) * x.size(2), argument, "rows");
  parameters.tokens = int32_t(x.size(1));
  parameters.heads = int32_t(x.size(2));
  parameters.x = row_strides(x);
  return parameters;
}

// Returns the vector width of rows that a contiguous weight multiplies.
inline int vector_width(const optional<Tensor>& weight,
                        std::initializer_list<std::reference_wrapper<const Tensor>> rows) {
  return weight.has_value() && weight->storage_offset() % 4 != 0 ? 1 : vector_width(rows);
}

// x is [B, T, H, D] with a last stride of 1. y has as many elements and is contiguous. rstd has one float32 per row and
// is contiguous.
Launch launch_l2norm(const Tensor& x, double eps, const Tensor& y, const optional<Tensor>& rstd = std::nullopt);

// Partial sums [rows, elements, columns], f32, are added up in a fixed order.
Tensor partial_sums(const Tensor& like, int64_t rows, int64_t columns);
Launch launch_sum_partials(const Tensor& partials, const Tensor& result);

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
  int width() const { return std::min(vector_width(q_weight, {q, cos, sin}), vector_width(k_weight, {k})); }
};

}  // namespace torch_gdn
