// Turns tensors into parameter blocks of the AURA kernels.
#pragma once
#include "metal/parameters.h"
#include "ops/aura/aura.h"
#include "shaders/aura/parameters.h"

namespace torch_gdn {

// Returns x [.., D] or [..] as [B, H, T, ..]. Missing dimensions have size 1, and surplus dimensions are merged.
Tensor as_vectors(const Tensor& x, const char* name);
Tensor as_values(const Tensor& x, const char* name);

VectorStrides vector_strides(const Tensor& x);            // [B, H, T] or [B, H, T, D]
VectorStrides vector_strides(const optional<Tensor>& x);  // zeros if there is no tensor

// x is [B, H, T, ..].
VectorParameters vector_parameters(const Tensor& x);

// Returns the template argument of kernels that stands for a code (shaders/aura/parameters.h).
inline int64_t number_of(const Code& code) { return code.is_trellis() ? kTrellis + code.bits : code.bits; }

int64_t rotation_groups(int64_t vectors, int64_t D);

}  // namespace torch_gdn
