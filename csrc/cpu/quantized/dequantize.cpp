#include "ops/quantized/dequantize.h"

#include <ATen/Parallel.h>

#include "cpu/define.h"
#include "cpu/quantized/dequantized.h"

namespace torch_gdn {
namespace {

void run(const Dequantize<int64_t>& op, const Tensor& rows) {
  const cpu::PackedRows weight(op.weight, op.scales, op.biases, op.packing);
  const int64_t K = op.K, count = rows.numel() / K;
  const Tensor indices = op.indices.has_value() ? op.indices->to(at::kLong).contiguous() : Tensor();
  const auto* index = indices.defined() ? indices.const_data_ptr<int64_t>() : nullptr;
  const bool is_f32 = rows.scalar_type() == at::kFloat;
  const Tensor decoded = is_f32 ? rows : at::empty(rows.sizes(), rows.options().dtype(at::kFloat));
  auto* target = decoded.mutable_data_ptr<float>();
  at::parallel_for(0, count, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) weight.dequantize(index != nullptr ? index[i] : i, target + i * K);
  });
  if (!is_f32) rows.copy_(decoded);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<Dequantize, &run>(m); }

}  // namespace torch_gdn
