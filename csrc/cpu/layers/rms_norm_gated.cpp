#include "ops/layers/rms_norm_gated.h"

#include "cpu/define.h"
#include "cpu/layers/kernels.h"
#include "cpu/layers/rows.h"
#include "cpu/simd/layer_kernels.h"

namespace torch_gdn {
namespace {}  // namespace

void cpu::rms_norm_gated(const RmsNormGated<int64_t>& op, const Tensor& y) {
  if (y.numel() == 0) return;
  const Tensor x = cpu::four_dimensions(op.x, "x"), g = cpu::four_dimensions(op.g, "g");
  const Tensor weight = op.weight.has_value() ? op.weight->to(at::kFloat).contiguous() : Tensor();
  const cpu::RowsOf in(x), gates(g);
  auto* out = static_cast<char*>(y.mutable_data_ptr());
  const int64_t row_size = op.D * y.element_size();
  const auto normalise = cpu::gated_norm_kernels().normalise_rows(x.scalar_type(), g.scalar_type());
  at::parallel_for(0, y.numel() / op.D, ceil_div(cpu::kElementsPerCore, op.D), [&](int64_t begin, int64_t end) {
    cpu::GatedNormRows rows{.x = nullptr,
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

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<RmsNormGated, &cpu::rms_norm_gated>(m); }

}  // namespace torch_gdn
