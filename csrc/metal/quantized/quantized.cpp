#include "ops/quantized/quantized.h"

#include <bit>

#include "metal/gates.h"
#include "metal/implement.h"
#include "shaders/experts/parameters.h"
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

constexpr int64_t kFewRows = 8;  // most rows of x whose sums fit in a kernel's registers

void run(const QuantizedLinear<int64_t>& op, const Tensor& y) {
  if (y.numel() == 0) return;
  const Tensor x = unit_last_stride(op.x.reshape({-1, op.K}), "x");
  QuantizedLinearParameters parameters{};
  parameters.weight = matrix_parameters(op.weight, op.scales, op.biases, op.packing);
  parameters.x_stride = x.stride(0);
  parameters.bias_stride = op.bias.has_value() ? op.bias->stride(0) : 0;
  parameters.bias_type = op.bias.has_value() ? element_type(*op.bias) : kAbsent;
  parameters.M = int32_count(x.size(0), "quantized_linear: x", "rows");
  parameters.N = int32_count(op.N, "quantized_linear: weight", "rows");
  parameters.K = int32_count(op.K, "quantized_linear: x", "columns");
  const int width = vector_width({x, op.weight});
  const int64_t M = x.size(0);
  const TemplateArgument bits = bits_of(op.packing);
  const auto dtype = x.scalar_type();
  if (M <= kFewRows) {
    const auto most = int64_t(std::bit_ceil(uint64_t(M)));
    launcher().run({{"quantized/quantized_linear",
                     {dtype, most, width, bits},
                     {x, op.weight, op.scales, op.biases, op.bias, y, parameters},
                     {ceil_div(op.N, kLinearRows), 1, 1},
                     kLinearSimdgroups * 32}});
    return;
  }
  launcher().run({{"quantized/quantized_linear_tiles",
                   {dtype, width, bits},
                   {x, op.weight, op.scales, op.biases, op.bias, y, parameters},
                   {ceil_div(op.N, 2 * kTileColumns), ceil_div(M, kTilePairs), 1},
                   kTileThreads}});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  metal::implement<Dequantize, &run>(m);
  metal::implement<QuantizedLinear, &run>(m);
}

}  // namespace torch_gdn
