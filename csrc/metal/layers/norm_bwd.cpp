#include "ops/layers/norm_bwd.h"

#include "metal/implement.h"
#include "metal/layers/rows.h"
#include "metal/layers/sum_partials.h"
#include "shaders/layers/norm_bwd.h"

namespace torch_gdn {

namespace {

constexpr int64_t kNormRows = 16;          // per threadgroup, at least, if there is a gradient of the weight
constexpr int64_t kMostNormGroups = 1024;  // so that few partial sums are left to add

void norm_bwd(const NormBwd<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto& [dx, dg, dweight] = outputs;
  TORCH_CHECK_VALUE(op.D <= kNormBwdLargestRow, "norm_bwd: x: expected a last dimension of at most ",
                    kNormBwdLargestRow, " on mps, got ", op.D);  // longer rows need more registers than a GPU has
  if (dx.numel() == 0) {
    dweight.zero_();
    return;
  }
  const Tensor x = as_rows(op.x, "x"), dy = as_rows(op.dy, "dy");
  const Tensor g = op.g.has_value() ? as_rows(*op.g, "g") : x, dh = op.dh.has_value() ? as_rows(*op.dh, "dh") : x;
  const auto weight = contiguous(op.weight);
  auto parameters = row_parameters<NormBwdParameters>(x, "norm_bwd: x");
  parameters.dy = row_strides(dy);
  parameters.gate = row_strides(g);
  parameters.dh = row_strides(dh);
  parameters.eps = float(op.eps);
  parameters.count = op.over_sum ? 1.0f : float(op.D);
  const int64_t spread = ceil_div(int64_t(parameters.rows), kMostNormGroups);
  parameters.rows_of_group = op.has_dweight() ? std::max(kNormRows, spread) : 1;
  parameters.has_weight = weight.has_value();
  parameters.has_gate = op.g.has_value();
  parameters.has_sigmoid = op.has_sigmoid();
  parameters.has_dh = op.dh.has_value();
  parameters.has_dweight = op.has_dweight();
  parameters.zero_centered = op.zero_centered;
  const int64_t groups = ceil_div(parameters.rows, parameters.rows_of_group);
  const Tensor partials = partial_sums(x, op.has_dweight() ? groups : 0, op.D);
  const bool aligned = !weight.has_value() || weight->storage_offset() % 4 == 0;
  launcher().run({{"layers/norm_bwd",
                   {x.scalar_type(), g.scalar_type(), weight.value_or(x).scalar_type(), op.D,
                    aligned ? vector_width({x, dy, g, dh}) : 1},
                   {dy, x, weight, op.g.has_value() ? g : Tensor(), op.dh.has_value() ? dh : Tensor(), dx, dg, partials,
                    parameters},
                   {groups, 1, 1},
                   norm_bwd_threads(int(op.D))}});
  if (op.has_dweight()) launcher().run({launch_sum_partials(partials, dweight)});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<NormBwd, &norm_bwd>(m); }

}  // namespace torch_gdn
