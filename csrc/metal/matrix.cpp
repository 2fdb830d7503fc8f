#include "metal/matrix.h"

#include <bit>

#include "metal/gates.h"

namespace torch_gdn {

constexpr int64_t kMostRowStride = int64_t(1) << 26;  // a kernel's offset of 32 rows has 32 bits

static int64_t row_stride(const Tensor& x) {
  TORCH_CHECK_VALUE(x.stride(-2) <= kMostRowStride,
                    "torch_gdn: expected rows of weights at most 2^26 elements apart, got ", x.stride(-2));
  return x.stride(-2);
}

static int64_t expert_stride(const Tensor& x) { return x.dim() > 2 ? x.stride(0) : 0; }

MatrixParameters matrix_parameters(const Tensor& weight, const std::optional<Tensor>& scales,
                                   const std::optional<Tensor>& biases, const Packing& packing) {
  MatrixParameters parameters{};
  parameters.expert_stride = expert_stride(weight);
  parameters.row_stride = row_stride(weight);
  if (!scales.has_value()) return parameters;
  parameters.scales_expert_stride = expert_stride(*scales);
  parameters.scales_row_stride = row_stride(*scales);
  parameters.biases_expert_stride = expert_stride(*biases);
  parameters.biases_row_stride = row_stride(*biases);
  parameters.scale_type = element_type(*scales);
  parameters.group_shift = std::countr_zero(uint64_t(packing.group));
  return parameters;
}

}  // namespace torch_gdn
