#include "ops/layers/rms_norm.h"

#include "metal/implement.h"
#include "metal/layers/rows.h"
#include "shaders/layers/rms_norm.h"

namespace torch_gdn {

namespace {

static_assert(RmsNorm<int64_t>::kLargestRow == kRmsNormLargestRow);

Launch launch_rms_norm(const RmsNorm<int64_t>& op, const Tensor& x, const Tensor& residual,
                       const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [y, residual_out] = outputs;
  const bool has_weight = op.weight.has_value(), has_residual = op.residual.has_value();
  auto parameters = row_parameters<RmsNormParameters>(x, "rms_norm: x");
  parameters.residual = row_strides(residual);
  parameters.eps = float(op.eps);
  parameters.has_weight = has_weight;
  parameters.has_residual = has_residual;
  parameters.zero_centered = op.zero_centered;
  parameters.round_norm = op.round_norm;
  const Tensor weight = has_weight ? op.weight->contiguous() : x;  // x: a dummy
  const bool aligned = !has_weight || weight.storage_offset() % 4 == 0;
  return {"rms_norm",
          "layers/rms_norm.metal",
          {x.scalar_type(), weight.scalar_type(), op.D, aligned ? vector_width({x, residual}) : 1},
          {x, residual, weight, y, has_residual ? residual_out : y, Binding::values(parameters)},
          {size_t(parameters.rows), 1, 1},
          size_t(rms_norm_threads(int(op.D)))};
}

void run(const RmsNorm<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  if (op.x.numel() == 0) return;
  const Tensor x = as_rows(op.x, "x"), residual = op.residual.has_value() ? as_rows(*op.residual, "residual") : x;
  launcher().run({launch_rms_norm(op, x, residual, outputs)});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<RmsNorm, &run>(m); }

}  // namespace torch_gdn
