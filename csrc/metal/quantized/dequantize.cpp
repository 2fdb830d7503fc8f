#include "ops/quantized/dequantize.h"

#include "metal/implement.h"
#include "metal/matrix.h"
#include "shaders/quantized/dequantize.h"
#include "shaders/quantized/parameters.h"

namespace torch_gdn {

namespace {

void run(const Dequantize<int64_t>& op, const Tensor& rows) {
  if (rows.numel() == 0) return;
  const auto indices = contiguous(op.indices);
  DequantizeParameters parameters{};
  parameters.weight = matrix_parameters(op.weight, op.scales, op.biases, op.packing);
  parameters.N = int32_count(op.N, "dequantize: weight", "rows");
  parameters.K = int32_count(op.K, "dequantize: weight", "columns");
  parameters.index_bytes = indices.has_value() ? int32_t(indices->element_size()) : 0;
  parameters.op = op_name();
  const int64_t count = rows.numel() / op.K;
  int32_count(count, "dequantize: indices", "rows");
  launcher().run({{"quantized/dequantize",
                   {rows.scalar_type(), bits_of(op.packing)},
                   {op.weight, op.scales, op.biases, indices, rows, Binding::error_log(), parameters},
                   {ceil_div(op.K, kDequantizeThreads * kDequantizeColumns), count, 1},
                   kDequantizeThreads}});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<Dequantize, &run>(m); }

}  // namespace torch_gdn
