// Turns tensors into parameter blocks.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <initializer_list>
#include <optional>

#include "launch/launch.h"
#include "ops/chunk_shape.h"
#include "ops/quantized/packed.h"
#include "shaders/core/parameters.h"

namespace torch_gdn {

RowStrides row_strides(const Tensor& x);                              // x: [B, T, heads, D]
StateStrides state_strides(const Tensor& state, bool state_v_first);  // state: [N, HV, ...] or [B * NT, HV, ...]
SequenceParameters sequence_parameters(const ChunkShape<>& shape, const std::optional<Tensor>& cu_seqlens);
OpName op_name();  // the running op
HeadGroups head_groups(const ChunkShape<>& shape, int64_t key_heads);
inline HeadGroups head_groups(const ChunkShape<>& shape) { return head_groups(shape, shape.H); }

// Returns 4 if every row starts and ends on a multiple of 4 elements, or of 16 bytes for dtypes of 1 byte, else 1.
int vector_width(std::initializer_list<std::reference_wrapper<const Tensor>> tensors);

// Checks a number that kernels store in 32 bits (shaders/core/rows.h). `argument` and `what` are the words of the
// error.
int32_t int32_count(int64_t count, const char* argument, const char* what);

// Returns indices in the form that a launch binds: on the device with their strides, or as a small host array.
Tensor index_array(at::Device device, const Tensor& x);
std::optional<Tensor> index_array(at::Device device, const std::optional<Tensor>& x);

// Returns contiguous f32. It is for g and beta, which are small.
Tensor as_f32(const Tensor& x);

// Returns a contiguous intermediate. Our ops already return contiguous ones. Any other is copied, with one warning.
Tensor as_contiguous(const Tensor& x, const char* name);

std::optional<Tensor> contiguous(const std::optional<Tensor>& x);

std::optional<Tensor> state_as_f32(const std::optional<Tensor>& state);

// weight is [rows, columns], or [E, rows, columns] for experts. It is packed if it has scales.
MatrixParameters matrix_parameters(const Tensor& weight, const std::optional<Tensor>& scales,
                                   const std::optional<Tensor>& biases, const Packing& packing);

// Returns the template argument Bits of a kernel. Weights that are not packed have no such argument.
inline TemplateArgument bits_of(const Packing& packing) {
  if (packing.is_e4m3) return int(kE4M3);
  if (packing.is_e2m1) return int(kE2M1);
  return packing.bits == 0 ? TemplateArgument() : TemplateArgument(packing.bits);
}

}  // namespace torch_gdn
