#include "metal/parameters.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <bit>
#include <string_view>

#include "metal/gates.h"
#include "ops/op.h"

namespace torch_gdn {

RowStrides row_strides(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(2)}; }

StateStrides state_strides(const Tensor& state, bool state_v_first) {
  const int64_t last = state.dim() - 1;
  const int64_t key = state_v_first ? last : last - 1, value = state_v_first ? last - 1 : last;
  return {state.stride(last - 3), state.stride(last - 2), state.stride(key), state.stride(value)};
}

OpName op_name() {
  OpName name{};
  const std::string_view running = RunningOp::name();
  running.copy(name.text, sizeof(name.text) - 1);
  return name;
}

SequenceParameters sequence_parameters(const ChunkShape<>& shape, const std::optional<Tensor>& cu_seqlens) {
  TORCH_CHECK_VALUE(shape.T <= INT32_MAX && shape.N <= INT32_MAX && shape.NT <= INT32_MAX,
                    "torch_gdn: expected fewer than 2^31 tokens, sequences and chunks, got T = ", shape.T,
                    ", N = ", shape.N, ", NT = ", shape.NT);
  SequenceParameters parameters{};
  parameters.tokens = int32_t(shape.T);
  parameters.sequences = int32_t(shape.N);
  parameters.chunks = int32_t(shape.NT);
  parameters.op = op_name();
  if (shape.packed) {
    parameters.boundary_stride = cu_seqlens->stride(0);
    parameters.boundary_bytes = int32_t(cu_seqlens->element_size());
  }
  return parameters;
}

HeadGroups head_groups(const ChunkShape<>& shape, int64_t key_heads) {
  const auto ratio = int32_t(shape.HV / key_heads), heads = int32_t(key_heads);
  return shape.tiled ? HeadGroups{1, heads, ratio, heads} : HeadGroups{ratio, heads, ratio, 1};
}

int vector_width(std::initializer_list<std::reference_wrapper<const Tensor>> tensors) {
  for (const Tensor& x : tensors) {
    const int64_t count = x.element_size() == 1 ? 16 : 4;  // a load takes as many
    bool aligned = x.storage_offset() % count == 0 && x.size(-1) % count == 0;
    for (int64_t d = 0; d + 1 < x.dim(); ++d) aligned = aligned && (x.size(d) == 1 || x.stride(d) % count == 0);
    if (!aligned) return 1;
  }
  return 4;
}

int32_t int32_count(int64_t count, const char* argument, const char* what) {
  TORCH_CHECK_VALUE(count <= INT32_MAX, argument, ": expected fewer than 2^31 ", what, ", got ", count);
  return int32_t(count);
}

// An array that is too long for setBytes is copied to the device. The copy waits for all work that was encoded before.
// A server therefore keeps such arrays on the device.
Tensor index_array(at::Device device, const Tensor& x) {
  if (!x.is_cpu()) return x;
  const Tensor numbers = x.contiguous();
  return numbers.nbytes() <= kMostOfSetBytes ? numbers : numbers.to(device);
}

std::optional<Tensor> index_array(at::Device device, const std::optional<Tensor>& x) {
  return x.has_value() ? std::optional(index_array(device, *x)) : x;
}

Tensor as_f32(const Tensor& x) { return x.to(at::kFloat).contiguous(); }

Tensor as_contiguous(const Tensor& x, const char* name) {
  if (x.is_contiguous()) return x;
  TORCH_WARN_ONCE("torch_gdn: ", name, " is not contiguous and is copied on every call");
  return x.contiguous();
}

std::optional<Tensor> contiguous(const std::optional<Tensor>& x) {
  return x.has_value() ? std::optional(x->contiguous()) : x;
}

std::optional<Tensor> state_as_f32(const std::optional<Tensor>& state) {
  return state.has_value() ? state->to(at::kFloat) : state;
}

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
