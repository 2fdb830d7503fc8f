#include "ops/layers/norm_bwd.h"

#include "cpu/define.h"
#include "cpu/layers/partial_sums.h"
#include "cpu/simd/layer_kernels.h"

namespace torch_gdn {
namespace {

// Returns the address of a row of a contiguous tensor, or nullptr without a tensor.
char* row_of(const Tensor& x, int64_t row, int64_t D) {
  return x.defined() ? static_cast<char*>(const_cast<void*>(x.const_data_ptr())) + row * D * x.element_size() : nullptr;
}

void norm_bwd(const NormBwd<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto& [dx, dg, dweight] = outputs;
  const int64_t D = op.D, rows = dx.numel() / D, at_once = cpu::tokens_of_block(rows, ceil_div(16384, D));
  const Tensor dy = op.dy.contiguous(), x = op.x.contiguous();
  const Tensor g = op.g.has_value() ? op.g->contiguous() : Tensor();
  const Tensor dh = op.dh.has_value() ? op.dh->contiguous() : Tensor();
  Tensor weight = op.weight.has_value() ? op.weight->to(at::kFloat).contiguous() : Tensor();
  if (op.zero_centered) weight = weight.add(1);
  const Tensor partials = cpu::partial_sums(op.has_dweight() ? ceil_div(rows, at_once) : 0, D);
  const auto run =
      cpu::norm_bwd_kernels().differentiate_rows(x.scalar_type(), (op.g.has_value() ? g : x).scalar_type());
  at::parallel_for(0, ceil_div(rows, at_once), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(D);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t row = block * at_once;
      run({.dy = row_of(dy, row, D),
           .x = row_of(x, row, D),
           .gate = row_of(g, row, D),
           .dh = row_of(dh, row, D),
           .dx = row_of(dx, row, D),
           .dgate = op.g.has_value() ? row_of(dg, row, D) : nullptr,
           .rows = std::min(at_once, rows - row),
           .D = D,
           .weight = weight.defined() ? weight.const_data_ptr<float>() : nullptr,
           .eps = static_cast<float>(op.eps),
           .count = op.over_sum ? 1.0f : static_cast<float>(D),
           .sigmoid = op.has_sigmoid(),
           .dnormed = scratch.data(),
           .dweight = op.has_dweight() ? partials.mutable_data_ptr<float>() + block * D : nullptr});
    }
  });
  cpu::add_partial_sums(partials, dweight);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<NormBwd, &norm_bwd>(m); }

}  // namespace torch_gdn
