// Turns tensors into parameter blocks of the AURA kernels.
#pragma once
#include "metal/parameters.h"
#include "ops/aura/aura.h"
#include "shaders/aura/parameters.h"

namespace torch_gdn {

// Returns x as `count` dimensions. Missing ones have size 1, and surplus ones are merged.
inline Tensor with_dimensions(Tensor x, int64_t count, const char* name) {
  while (x.dim() < count) x = x.unsqueeze(0);
  return x.dim() == count ? x : as_contiguous(x, name).flatten(0, x.dim() - count);
}

// Returns x [.., D] or [..] as [B, H, T, ..].
inline Tensor as_vectors(const Tensor& x, const char* name) {
  return with_dimensions(unit_last_stride(x, name), 4, name);
}
inline Tensor as_values(const Tensor& x, const char* name) { return with_dimensions(x, 3, name); }

// Returns the strides of [B, H, T] or [B, H, T, D], or zeros if there is no tensor.
inline VectorStrides vector_strides(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(2)}; }
inline VectorStrides vector_strides(const optional<Tensor>& x) {
  return x.has_value() ? vector_strides(*x) : VectorStrides{};
}

// x is [B, H, T, ..].
inline VectorParameters vector_parameters(const Tensor& x) {
  const int64_t count = x.size(0) * x.size(1) * x.size(2);
  return {int32_count(count, "torch_gdn: x", "vectors"), int32_t(x.size(1)), int32_t(x.size(2))};
}

// Returns the template argument of kernels that stands for a code (shaders/aura/parameters.h).
inline int64_t number_of(const Code& code) { return code.is_trellis() ? kTrellis + code.bits : code.bits; }

inline int64_t rotation_groups(int64_t vectors, int64_t D) {
  return ceil_div(vectors, kAuraThreads / lanes_of(int(D)));
}

}  // namespace torch_gdn
