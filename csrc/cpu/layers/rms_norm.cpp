#include "ops/layers/rms_norm.h"

#include "cpu/define.h"
#include "cpu/layers/rows.h"
#include "cpu/simd/layer_kernels.h"

namespace torch_gdn {
namespace {

void run(const RmsNorm<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [y, residual_out] = outputs;
  if (y.numel() == 0) return;
  const bool has_residual = op.residual.has_value();
  const Tensor x = cpu::four_dimensions(op.x, "x");
  const Tensor weight = op.weight.has_value() ? op.weight->to(at::kFloat).contiguous() : Tensor();
  const Tensor residual = has_residual ? cpu::four_dimensions(*op.residual, "residual") : x;
  const cpu::RowsOf in(x), added(residual);
  const int64_t row_size = op.D * y.element_size();
  const auto normalise = cpu::norm_kernels().normalise_rows(x.scalar_type(), has_residual);
  auto* const out = static_cast<char*>(y.mutable_data_ptr());
  auto* const sum = has_residual ? static_cast<char*>(residual_out.mutable_data_ptr()) : nullptr;
  at::parallel_for(0, y.numel() / op.D, ceil_div(cpu::kElementsPerCore, op.D), [&](int64_t begin, int64_t end) {
    cpu::NormRows rows{.x_stride = in.stride(),
                       .residual_stride = added.stride(),
                       .D = op.D,
                       .weight = weight.defined() ? weight.const_data_ptr<float>() : nullptr,
                       .weight_offset = op.zero_centered ? 1.0f : 0.0f,
                       .eps = static_cast<float>(op.eps),
                       .round_norm = op.round_norm};
    for (int64_t row = begin; row < end; row += rows.rows) {
      rows.rows = std::min(in.evenly_spaced(row, end - row), added.evenly_spaced(row, end - row));
      rows.x = in.at(row);
      rows.residual = added.at(row);
      rows.out = out + row * row_size;
      rows.sum = has_residual ? sum + row * row_size : nullptr;
      normalise(rows);
    }
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<RmsNorm, &run>(m); }

}  // namespace torch_gdn
