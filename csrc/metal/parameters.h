// What the launches of the Gated DeltaNet ops share: tensors -> parameter blocks.
#pragma once
#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "metal/launch.h"
#include "ops/chunk_shape.h"
#include "shaders/core/parameters.h"

namespace torch_gdn {

// As Metal spells it: "float", "half" or "bfloat".
std::string metal_type(at::ScalarType dtype);

RowStrides row_strides(const Tensor& x);                              // x: [B, T, heads, D]
StateStrides state_strides(const Tensor& state, bool state_v_first);  // state: [N, HV, ...] or [B * NT, HV, ...]
SequenceParameters sequence_parameters(const ChunkShape<>& shape);
HeadGroups head_groups(const ChunkShape<>& shape);

// 4 where each row of each tensor starts and ends on a multiple of 4 elements, so that 4 can be loaded at once; else 1.
std::string vector_width(std::initializer_list<Tensor> tensors);

// g and beta are small; the kernels read them as contiguous f32.
Tensor as_f32(const Tensor& x);

// An intermediate of the chunk stages, which our own ops make contiguous; any other is copied, with one warning.
Tensor as_contiguous(const Tensor& x, const char* name);

// What stands in for an absent tensor at a binding that the kernel does not read: Metal wants something bound, and at
// an offset that suits the type there, as the start of a storage suits each.
Tensor or_dummy(const std::optional<Tensor>& x, const Tensor& stand_in);

// The kernels read states as f32, of any strides; one of another dtype is converted.
std::optional<Tensor> state_as_f32(const std::optional<Tensor>& state);

}  // namespace torch_gdn
