// What the launches of the AURA ops share: tensors -> parameter blocks.
#pragma once
#include "metal/parameters.h"
#include "shaders/aura/parameters.h"

namespace torch_gdn {

// Vectors [.., D], or one value each [..], as [B, H, T, ..]: missing dimensions have size 1, surplus ones are merged.
Tensor as_vectors(const Tensor& x, const char* name);
Tensor as_values(const Tensor& x, const char* name);

VectorStrides vector_strides(const Tensor& x);            // [B, H, T] or [B, H, T, D]
VectorStrides vector_strides(const optional<Tensor>& x);  // zeros without a tensor

// Of a tensor [B, H, T, ..].
VectorParameters vector_parameters(const Tensor& x);

// Threadgroups that take so many vectors.
size_t rotation_groups(int64_t vectors, int64_t D);

}  // namespace torch_gdn
