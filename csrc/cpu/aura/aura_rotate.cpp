#include <torch/library.h>

#include <cmath>

#include "cpu/aura/aura_common.h"

namespace torch_gdn {
namespace {

Tensor aura_rotate(const Tensor& x, const Tensor& signs, double scale, bool inverse) {
  const auto s = check_aura_rotate(x, signs, scale, inverse);
  const Tensor y = at::empty(x.sizes(), x.options().dtype(at::kFloat));
  if (x.numel() == 0) return y;
  const Tensor in_four = cpu::as_four(unit_last_stride(x, "x")), out_four = cpu::as_four(y), row = signs.contiguous();
  const cpu::Rows in(in_four), out(out_four);
  const auto factor = static_cast<float>(scale / std::sqrt(static_cast<double>(s.D)));
  const int64_t heads = in_four.size(1), tokens = in_four.size(2);
  at::parallel_for(0, in_four.size(0) * heads * tokens, 64, [&](int64_t begin, int64_t end) {
    std::vector<float> values(s.D);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = i % tokens, h = i / tokens % heads, b = i / tokens / heads;
      in.read(b, h, t, 0, s.D, values.data());
      cpu::rotate(values.data(), row.const_data_ptr<float>(), s.D, inverse);
      for (float& value : values) value *= factor;
      out.write(b, h, t, 0, s.D, values.data());
    }
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CPU, m) { m.impl("aura_rotate", &aura_rotate); }

}  // namespace torch_gdn
