#include "ops/layers/rms_norm.h"

#include "metal/implement.h"
#include "metal/layers/rows.h"
#include "shaders/layers/rms_norm.h"

namespace torch_gdn {

namespace {

static_assert(RmsNorm<int64_t>::kLargestRow == kRmsNormLargestRow);

Launch launch_rms_norm(const RmsNorm<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [y, residual_out] = outputs;
  const Tensor x = as_rows(op.x, "x");
  auto parameters = row_parameters<RmsNormParameters>(x, "rms_norm: x");
  int width = vector_width({x});
  auto residual = op.residual;
  const auto weight = contiguous(op.weight);
  if (residual.has_value()) {
    residual = as_rows(*residual, "residual");
    parameters.residual = row_strides(*residual);
    width = std::min(width, vector_width({*residual}));
  }
  if (weight.has_value() && weight->storage_offset() % 4 != 0) width = 1;
  parameters.eps = float(op.eps);
  parameters.has_weight = weight.has_value();
  parameters.has_residual = residual.has_value();
  parameters.zero_centered = op.zero_centered;
  parameters.round_norm = op.round_norm;
  return {"layers/rms_norm",
          {x.scalar_type(), weight.value_or(x).scalar_type(), op.D, width},
          {x, residual, weight, y, residual_out, parameters},
          {parameters.rows, 1, 1},
          rms_norm_threads(int(op.D))};
}

void run(const RmsNorm<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  if (op.x.numel() == 0) return;
  launcher().run({launch_rms_norm(op, outputs)});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<RmsNorm, &run>(m); }

}  // namespace torch_gdn
