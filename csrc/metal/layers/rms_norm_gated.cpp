#include "ops/layers/rms_norm_gated.h"

#include "metal/implement.h"
#include "metal/layers/rows.h"
#include "shaders/layers/rms_norm_gated.h"

namespace torch_gdn {

namespace {

Launch launch_rms_norm_gated(const RmsNormGated<int64_t>& op, const Tensor& x, const Tensor& g, const Tensor& y) {
  auto parameters = row_parameters<RmsNormGatedParameters>(x, "rms_norm_gated: x");
  parameters.gate = row_strides(g);
  parameters.eps = float(op.eps);
  parameters.has_weight = op.weight.has_value();
  parameters.has_sigmoid = op.has_sigmoid();
  parameters.round_norm = op.round_norm;
  parameters.round_product = op.round_product();
  const auto weight = contiguous(op.weight);
  const bool aligned = !weight.has_value() || weight->storage_offset() % 4 == 0;
  return {
      "layers/rms_norm_gated",
      {x.scalar_type(), g.scalar_type(), weight.value_or(x).scalar_type(), op.D, aligned ? vector_width({x, g}) : 1},
      {x, g, weight, y, parameters},
      {ceil_div(parameters.rows, kRmsNormGatedRows), 1, 1},
      32 * kRmsNormGatedRows};
}

void run(const RmsNormGated<int64_t>& op, const Tensor& y) {
  TORCH_CHECK_VALUE(op.D <= kRmsNormGatedLargestRow, "rms_norm_gated: x: expected a last dimension of at most ",
                    kRmsNormGatedLargestRow, " on mps, got ", op.D);  // a simdgroup keeps a row in its registers
  if (y.numel() == 0) return;
  launcher().run({launch_rms_norm_gated(op, as_rows(op.x, "x"), as_rows(op.g, "g"), y)});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<RmsNormGated, &run>(m); }

}  // namespace torch_gdn
