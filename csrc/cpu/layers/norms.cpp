// Norms and their gradients, row by row.
#include "cpu/define.h"
#include "cpu/layers/kernels.h"
#include "cpu/layers/partial_sums.h"
#include "cpu/simd/layer_kernels.h"
#include "ops/layers/rows.h"

namespace torch_gdn::cpu {
namespace {

Tensor floats_of(const optional<Tensor>& weight) {
  return weight.has_value() ? weight->to(at::kFloat).contiguous() : Tensor();
}

const float* data_of(const Tensor& floats) { return floats.defined() ? floats.const_data_ptr<float>() : nullptr; }

// Returns the address of a row of a contiguous tensor, or nullptr without a tensor.
char* row_of(const Tensor& x, int64_t row, int64_t D) {
  return x.defined() ? static_cast<char*>(const_cast<void*>(x.const_data_ptr())) + row * D * x.element_size() : nullptr;
}

// Calls f(first, count) for rows that are evenly spaced in both tensors. The calls are spread over the cores.
template <typename F>
void for_each_rows(int64_t count, int64_t D, const Rows& x, const Rows& other, const F& f) {
  at::parallel_for(0, count, ceil_div(kElementsPerCore, D), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin, rows; row < end; row += rows) {
      rows = std::min(x.evenly_spaced(row, end - row), other.evenly_spaced(row, end - row));
      f(row, rows);
    }
  });
}

void run(const L2Norm<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [y, rstd] = outputs;
  if (op.finish_without_elements(y, rstd)) return;
  const int64_t width = y.size(-1);
  const Tensor x_rows = unit_last_stride(op.x, "x").reshape({1, -1, 1, width});
  const Rows in(x_rows), out(y.view({1, -1, 1, width}));
  float* factors = op.return_rstd ? rstd.mutable_data_ptr<float>() : nullptr;
  at::parallel_for(0, x_rows.size(1), 32768 / width + 1, [&](int64_t begin, int64_t end) {
    std::vector<float> row(width);
    row_kernels().normalise(in.head(0, begin, 0), out.head(0, begin, 0), end - begin, width, static_cast<float>(op.eps),
                            row.data(), factors ? factors + begin : nullptr);
  });
}

void run(const RmsNorm<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [y, residual_out] = outputs;
  if (y.numel() == 0) return;
  const Tensor weight = floats_of(op.weight);
  const Rows in = rows_of(op.x, "x");
  const auto added = op.residual.has_value() ? optional(rows_of(*op.residual, "residual")) : std::nullopt;
  for_each_rows(y.numel() / op.D, op.D, in, added ? *added : in, [&](int64_t row, int64_t rows) {
    norm_kernels().normalise({.dtype = y.scalar_type(),
                              .x = in.row(row),
                              .residual = added ? added->row(row) : nullptr,
                              .out = row_of(y, row, op.D),
                              .sum = added ? row_of(residual_out, row, op.D) : nullptr,
                              .x_stride = in.spacing(),
                              .residual_stride = added ? added->spacing() : 0,
                              .rows = rows,
                              .D = op.D,
                              .weight = data_of(weight),
                              .weight_offset = op.zero_centered ? 1.0f : 0.0f,
                              .eps = static_cast<float>(op.eps),
                              .round_norm = op.round_norm});
  });
}

void run(const NormBwd<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto& [dx, dg, dweight] = outputs;
  const int64_t D = op.D, rows = dx.numel() / D, at_once = tokens_of_block(rows, ceil_div(16384, D));
  const Tensor dy = op.dy.contiguous(), x = op.x.contiguous();
  const Tensor g = op.g.has_value() ? op.g->contiguous() : Tensor();
  const Tensor dh = op.dh.has_value() ? op.dh->contiguous() : Tensor();
  Tensor weight = floats_of(op.weight);
  if (op.zero_centered) weight = weight.add(1);
  const Tensor partials = partial_sums(op.has_dweight() ? ceil_div(rows, at_once) : 0, D);
  at::parallel_for(0, ceil_div(rows, at_once), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(D);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t row = block * at_once;
      norm_kernels().differentiate(
          {.dtype = x.scalar_type(),
           .gate_dtype = (g.defined() ? g : x).scalar_type(),
           .dy = row_of(dy, row, D),
           .x = row_of(x, row, D),
           .gate = row_of(g, row, D),
           .dh = row_of(dh, row, D),
           .dx = row_of(dx, row, D),
           .dgate = g.defined() ? row_of(dg, row, D) : nullptr,
           .rows = std::min(at_once, rows - row),
           .D = D,
           .weight = data_of(weight),
           .eps = static_cast<float>(op.eps),
           .count = op.over_sum ? 1.0f : static_cast<float>(D),
           .sigmoid = op.has_sigmoid(),
           .dnormed = scratch.data(),
           .dweight = op.has_dweight() ? partials.mutable_data_ptr<float>() + block * D : nullptr});
    }
  });
  add_partial_sums(partials, dweight);
}

}  // namespace

void rms_norm_gated(const RmsNormGated<int64_t>& op, const Tensor& y) {
  if (y.numel() == 0) return;
  const Tensor weight = floats_of(op.weight);
  const Rows in = rows_of(op.x, "x"), gates = rows_of(op.g, "g");
  for_each_rows(y.numel() / op.D, op.D, in, gates, [&](int64_t row, int64_t rows) {
    norm_kernels().normalise({.dtype = y.scalar_type(),
                              .gate_dtype = op.g.scalar_type(),
                              .x = in.row(row),
                              .gate = gates.row(row),
                              .out = row_of(y, row, op.D),
                              .x_stride = in.spacing(),
                              .gate_stride = gates.spacing(),
                              .rows = rows,
                              .D = op.D,
                              .weight = data_of(weight),
                              .eps = static_cast<float>(op.eps),
                              .round_norm = op.round_norm,
                              .round_product = op.round_product(),
                              .sigmoid = op.has_sigmoid()});
  });
}

TORCH_LIBRARY_FRAGMENT(gdn, m) {
  define<L2Norm, &run>(m);
  define<RmsNorm, &run>(m);
  define<RmsNormGated, &rms_norm_gated>(m);
  define<NormBwd, &run>(m);
}

}  // namespace torch_gdn::cpu
