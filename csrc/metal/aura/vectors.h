// What the launches of the AURA ops share: tensors -> parameter blocks.
#pragma once
#include "metal/parameters.h"
#include "ops/aura/aura.h"
#include "shaders/aura/parameters.h"

namespace torch_gdn {

constexpr int64_t kThreads = 128;

// Vectors [.., D], or one value each [..], as [B, H, T, ..]: missing dimensions have size 1, surplus ones are merged.
Tensor as_vectors(const Tensor& x, const char* name);
Tensor as_values(const Tensor& x, const char* name);

VectorStrides vector_strides(const Tensor& x);  // [B, H, T] or [B, H, T, D]

// Of a tensor [B, H, T, ..].
VectorParameters vector_parameters(const Tensor& x);

// Threadgroups of 4 simdgroups that hold so many vectors (shaders/aura/rotation.h).
size_t rotation_groups(int64_t vectors, int64_t D);

Launch launch_aura_rotate(const Tensor& x, const Tensor& signs, double scale, bool inverse, const Tensor& y,
                          const optional<Tensor>& sums);  // x: [B, H, T, D]

}  // namespace torch_gdn
