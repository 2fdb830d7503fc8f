#include "ops/layers/rms_norm_gated.h"

#include "cpu/common.h"
#include "cpu/define.h"
#include "cpu/simd/layer_kernels.h"

namespace torch_gdn {
namespace {

constexpr int64_t kElements = 16384;  // that a core takes at least

// Rows of [B, T, heads, D] in order, with any strides but a last one of 1.
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
        dense_(x.is_contiguous()) {}

  const void* at(int64_t row) const {
    if (dense_) return data_ + row * D_ * item_size_;
    const int64_t token = row / heads_, head = row % heads_;
    return data_ +
           (token / tokens_ * batch_stride_ + token % tokens_ * token_stride_ + head * head_stride_) * item_size_;
  }
  // How many of `count` rows from `row` on lie `stride()` apart.
  int64_t evenly_spaced(int64_t row, int64_t count) const {
    return dense_ ? count : std::min(count, heads_ - row % heads_);
  }
  int64_t stride() const { return dense_ ? D_ : head_stride_; }

 private:
  const char* data_;
  int64_t item_size_, tokens_, heads_, batch_stride_, token_stride_, head_stride_, D_;
  bool dense_;
};

Tensor four_dimensions(const Tensor& x_any, const char* name) {
  Tensor x = unit_last_stride(x_any, name);
  while (x.dim() < 4) x = x.unsqueeze(0);
  return x.dim() > 4 ? x.reshape({1, -1, 1, x.size(-1)}) : x;
}

void run(const RmsNormGated<int64_t>& op, const Tensor& y) {
  if (y.numel() == 0) return;
  const Tensor x = four_dimensions(op.x, "x"), g = four_dimensions(op.g, "g");
  const Tensor weight = op.weight.has_value() ? op.weight->to(at::kFloat).contiguous() : Tensor();
  const RowsOf in(x), gates(g);
  auto* out = static_cast<char*>(y.mutable_data_ptr());
  const int64_t row_size = op.D * y.element_size();
  const auto normalise = cpu::norm_kernels().normalise_rows(x.scalar_type(), g.scalar_type());
  at::parallel_for(0, y.numel() / op.D, ceil_div(kElements, op.D), [&](int64_t begin, int64_t end) {
    cpu::NormRows rows{.x = nullptr,
                       .gate = nullptr,
                       .out = nullptr,
                       .x_stride = in.stride(),
                       .gate_stride = gates.stride(),
                       .rows = 0,
                       .D = op.D,
                       .weight = weight.defined() ? weight.const_data_ptr<float>() : nullptr,
                       .eps = static_cast<float>(op.eps),
                       .sigmoid = op.has_sigmoid(),
                       .round_norm = op.round_norm,
                       .round_product = op.round_product()};
    for (int64_t row = begin; row < end; row += rows.rows) {
      rows.rows = std::min(in.evenly_spaced(row, end - row), gates.evenly_spaced(row, end - row));
      rows.x = in.at(row);
      rows.gate = gates.at(row);
      rows.out = out + row * row_size;
      normalise(rows);
    }
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<RmsNormGated, &run>(m); }

}  // namespace torch_gdn
