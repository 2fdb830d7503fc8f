#include "ops/layers/rms_norm_gated.h"

#include <torch/library.h>

#include "cpu/common.h"
#include "cpu/outputs.h"
#include "cpu/simd/layer_kernels.h"

namespace torch_gdn {
namespace {

constexpr int64_t kElements = 16384;  // of some rows, that one core takes at least

// Rows of a tensor [B, T, heads, D] in order, with whatever strides it has; more dimensions were made contiguous.
class RowsOf {
 public:
  explicit RowsOf(const Tensor& x)
      : data_(static_cast<const char*>(x.const_data_ptr())),
        item_size_(x.element_size()),
        tokens_(x.size(1)),
        heads_(x.size(2)),
        batch_stride_(x.stride(0)),
        token_stride_(x.stride(1)),
        head_stride_(x.stride(2)),
        D_(x.size(3)),
        whole_(x.is_contiguous()) {}

  const void* at(int64_t row) const {
    if (whole_) return data_ + row * D_ * item_size_;
    const int64_t token = row / heads_, head = row % heads_;
    return data_ +
           (token / tokens_ * batch_stride_ + token % tokens_ * token_stride_ + head * head_stride_) * item_size_;
  }
  // From `row` on, how many rows lie `stride()` apart, and that stride.
  int64_t run(int64_t row, int64_t count) const { return whole_ ? count : std::min(count, heads_ - row % heads_); }
  int64_t stride() const { return whole_ ? D_ : head_stride_; }

 private:
  const char* data_;
  int64_t item_size_, tokens_, heads_, batch_stride_, token_stride_, head_stride_, D_;
  bool whole_;
};

Tensor four_dimensions(const Tensor& x_any, const char* name) {
  Tensor x = unit_last_stride(x_any, name);
  while (x.dim() < 4) x = x.unsqueeze(0);
  return x.dim() > 4 ? x.reshape({1, -1, 1, x.size(-1)}) : x;
}

Tensor rms_norm_gated(const Tensor& x_any, const Tensor& g_any, const optional<Tensor>& weight, double eps,
                      c10::string_view activation, bool round_norm) {
  const auto shape = check_rms_norm_gated(x_any, g_any, weight, eps, activation, round_norm);
  const Tensor y = cpu::empty_output(x_any.sizes(), x_any.options());
  if (shape.rows == 0) return y;
  const Tensor x = four_dimensions(x_any, "x"), g = four_dimensions(g_any, "g");
  const Tensor factor = weight.has_value() ? weight->to(at::kFloat).contiguous() : Tensor();
  const RowsOf in(x), gates(g);
  auto* out = static_cast<char*>(y.mutable_data_ptr());
  const int64_t row_size = shape.D * y.element_size();
  const auto normalise = cpu::normalise_rows_kernel(x.scalar_type(), g.scalar_type());
  at::parallel_for(0, shape.rows, ceil_div(kElements, shape.D), [&](int64_t begin, int64_t end) {
    cpu::NormRows rows{.x = nullptr,
                       .gate = nullptr,
                       .out = nullptr,
                       .x_stride = in.stride(),
                       .gate_stride = gates.stride(),
                       .rows = 0,
                       .D = shape.D,
                       .weight = factor.defined() ? factor.const_data_ptr<float>() : nullptr,
                       .eps = static_cast<float>(eps),
                       .sigmoid = shape.sigmoid,
                       .round_norm = round_norm,
                       .round_product = shape.round_product};
    for (int64_t row = begin; row < end; row += rows.rows) {
      rows.rows = std::min(in.run(row, end - row), gates.run(row, end - row));
      rows.x = in.at(row);
      rows.gate = gates.at(row);
      rows.out = out + row * row_size;
      normalise(rows);
    }
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CPU, m) { m.impl("rms_norm_gated", &rms_norm_gated); }

}  // namespace torch_gdn
