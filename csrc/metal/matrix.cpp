#include "metal/matrix.h"

#include <bit>

#include "metal/gates.h"

namespace torch_gdn {

static int64_t row_stride(const Tensor& x) {
  return int32_count(x.stride(-2), "torch_gdn: weights", "elements from row to row");
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
  if (biases.has_value()) {
    parameters.biases_expert_stride = expert_stride(*biases);
    parameters.biases_row_stride = row_stride(*biases);
    parameters.has_zero_points = int16_t(has_zero_points(*biases));
  }
  if (!packing.is_e2m1) parameters.scale_type = int16_t(element_type(*scales));
  parameters.group_shift = std::countr_zero(uint64_t(packing.group));
  parameters.row_shift = std::countr_zero(uint64_t(packing.rows));
  parameters.columns = int32_count(weight.size(-1), "torch_gdn: weights", "columns");
  return parameters;
}

}  // namespace torch_gdn
