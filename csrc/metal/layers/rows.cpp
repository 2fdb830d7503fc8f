// The ops that treat each row by itself, and the sums of their partial gradients.
#include "metal/layers/rows.h"

#include <ATen/ops/empty.h>

#include "metal/implement.h"
#include "ops/layers/rows.h"
#include "shaders/layers/parameters.h"

namespace torch_gdn {

Tensor partial_sums(const Tensor& like, int64_t rows, int64_t columns) {
  return at::empty({rows, columns}, like.options().dtype(at::kFloat));
}

Launch launch_sum_partials(const Tensor& partials, const Tensor& result) {
  const int64_t rows = partials.size(0), elements = result.numel(), columns = partials.size(1) / elements;
  const SumPartialsParameters parameters{int32_t(rows), int32_count(elements, "weight", "elements"), int32_t(columns)};
  return {"layers/sum_partials",
          {result.scalar_type()},
          {partials, result, parameters},
          {ceil_div(elements, 32), 1, 1},
          32 * kSumRows};
}

Launch launch_l2norm(const Tensor& x, double eps, const Tensor& y, const optional<Tensor>& rstd) {
  const int64_t D = x.size(3);
  auto parameters = row_parameters<L2NormParameters>(x, "l2norm: x");
  parameters.has_rstd = rstd.has_value() ? 1 : 0;
  parameters.D = D;
  parameters.eps = float(eps);
  return {"layers/l2norm",
          {x.scalar_type(), D <= kL2NormBlock ? D : 0},
          {x, y, rstd, parameters},
          {ceil_div(parameters.rows, kL2NormRows), 1, 1},
          32 * kL2NormRows};
}

namespace {

void run(const ActAndMul<int64_t>& op, const Tensor& y) {
  if (y.numel() == 0) return;
  const Tensor gate = as_rows(op.gate, "gate"), up = as_rows(op.up, "up");
  const int64_t D = gate.size(3);
  auto parameters = row_parameters<ActAndMulParameters>(gate, "act_and_mul: gate");
  parameters.up = row_strides(up);
  parameters.D = int32_count(D, "act_and_mul: gate", "elements in a row");
  parameters.has_sigmoid = op.has_sigmoid();
  const int width = vector_width({gate, up});
  parameters.threads = int32_t(std::min<int64_t>(kActAndMulMostThreads, ceil_div(ceil_div(D, width), 32) * 32));
  launcher().run({{"layers/act_and_mul",
                   {gate.scalar_type(), width},
                   {gate, up, y, parameters},
                   {parameters.rows, ceil_div(D, int64_t(parameters.threads) * width), 1},
                   parameters.threads}});
}

void run(const L2Norm<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [y, rstd] = outputs;
  if (op.finish_without_elements(y, rstd)) return;
  launcher().run(
      {launch_l2norm(as_rows(op.x, "x"), op.eps, y, op.return_rstd ? optional<Tensor>(rstd) : std::nullopt)});
}

static_assert(kLargestRow == kRmsNormLargestRow);

void run(const RmsNorm<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  if (op.x.numel() == 0) return;
  const auto& [y, residual_out] = outputs;
  const Tensor x = as_rows(op.x, "x");
  auto parameters = row_parameters<RmsNormParameters>(x, "rms_norm: x");
  const auto weight = contiguous(op.weight);
  int width = vector_width(weight, {x});
  auto residual = op.residual;
  if (residual.has_value()) {
    residual = as_rows(*residual, "residual");
    parameters.residual = row_strides(*residual);
    width = std::min(width, vector_width({*residual}));
  }
  parameters.eps = float(op.eps);
  parameters.has_weight = weight.has_value();
  parameters.has_residual = residual.has_value();
  parameters.zero_centered = op.zero_centered;
  parameters.round_norm = op.round_norm;
  launcher().run({{"layers/rms_norm",
                   {x.scalar_type(), weight.value_or(x).scalar_type(), op.D, width},
                   {x, residual, weight, y, residual_out, parameters},
                   {parameters.rows, 1, 1},
                   rms_norm_threads(int(op.D))}});
}

void run(const RmsNormGated<int64_t>& op, const Tensor& y) {
  TORCH_CHECK_VALUE(op.D <= kRmsNormGatedLargestRow, "rms_norm_gated: x: expected a last dimension of at most ",
                    kRmsNormGatedLargestRow, " on mps, got ", op.D);  // a simdgroup keeps a row in its registers
  if (y.numel() == 0) return;
  const Tensor x = as_rows(op.x, "x"), g = as_rows(op.g, "g");
  auto parameters = row_parameters<RmsNormGatedParameters>(x, "rms_norm_gated: x");
  parameters.gate = row_strides(g);
  parameters.eps = float(op.eps);
  parameters.has_weight = op.weight.has_value();
  parameters.has_sigmoid = op.has_sigmoid();
  parameters.round_norm = op.round_norm;
  parameters.round_product = op.round_product();
  const auto weight = contiguous(op.weight);
  launcher().run(
      {{"layers/rms_norm_gated",
        {x.scalar_type(), g.scalar_type(), weight.value_or(x).scalar_type(), op.D, vector_width(weight, {x, g})},
        {x, g, weight, y, parameters},
        {ceil_div(parameters.rows, kRmsNormGatedRows), 1, 1},
        32 * kRmsNormGatedRows}});
}

// Returns the strides of an output, viewed as [B, T, H, D].
RowStrides output_strides(const Tensor& x, bool heads_first) {
  return row_strides(heads_first ? x.transpose(1, 2) : x);
}

void run(const QkNormRope<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [q_out, k_out] = outputs;
  if (q_out.numel() + k_out.numel() == 0) return;
  const char* q = "qk_norm_rope: q";
  const RotatedHeads in(op, q);
  QkNormRopeParameters parameters{};
  parameters.heads = int32_t(in.q.size(2) + in.k.size(2));
  parameters.rows = int32_count(op.B * op.T * parameters.heads, q, "rows");
  parameters.tokens = int32_t(op.T);
  parameters.q_heads = int32_t(in.q.size(2));
  parameters.q = row_strides(in.q), parameters.k = row_strides(in.k);
  parameters.q_out = output_strides(q_out, op.heads_first), parameters.k_out = output_strides(k_out, op.heads_first);
  parameters.rotation = in.rotation;
  launcher().run({{"layers/qk_norm_rope",
                   {in.q.scalar_type(), in.weight_type(), in.cos.scalar_type(), in.width()},
                   {in.q, in.k, in.cos, in.sin, in.q_weight, in.k_weight, q_out, k_out, parameters},
                   {ceil_div(parameters.rows, kRotatedRows), 1, 1},
                   32 * kRotatedRows}});
}

constexpr int64_t kNormRows = 16;          // per threadgroup, at least, if there is a gradient of the weight
constexpr int64_t kMostNormGroups = 1024;  // so that few partial sums are left to add

void run(const NormBwd<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
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
  launcher().run({{"layers/norm_bwd",
                   {x.scalar_type(), g.scalar_type(), weight.value_or(x).scalar_type(), op.D,
                    vector_width(weight, {x, dy, g, dh})},
                   {dy, x, weight, op.g.has_value() ? g : Tensor(), op.dh.has_value() ? dh : Tensor(), dx, dg, partials,
                    parameters},
                   {groups, 1, 1},
                   norm_bwd_threads(int(op.D))}});
  if (op.has_dweight()) launcher().run({launch_sum_partials(partials, dweight)});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  metal::implement<ActAndMul, &run>(m);
  metal::implement<L2Norm, &run>(m);
  metal::implement<RmsNorm, &run>(m);
  metal::implement<RmsNormGated, &run>(m);
  metal::implement<QkNormRope, &run>(m);
  metal::implement<NormBwd, &run>(m);
}

}  // namespace torch_gdn
