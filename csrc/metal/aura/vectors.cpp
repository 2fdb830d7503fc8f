#include "metal/aura/vectors.h"

namespace torch_gdn {

namespace {
Tensor with_dimensions(Tensor x, int64_t count, const char* name) {
  while (x.dim() < count) x = x.unsqueeze(0);
  return x.dim() == count ? x : as_contiguous(x, name).flatten(0, x.dim() - count);
}
}  // namespace

Tensor as_vectors(const Tensor& x, const char* name) { return with_dimensions(unit_last_stride(x, name), 4, name); }

Tensor as_values(const Tensor& x, const char* name) { return with_dimensions(x, 3, name); }

VectorStrides vector_strides(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(2)}; }

VectorStrides vector_strides(const optional<Tensor>& x) { return x.has_value() ? vector_strides(*x) : VectorStrides{}; }

VectorParameters vector_parameters(const Tensor& x) {
  const int64_t count = x.size(0) * x.size(1) * x.size(2);
  return {int32_count(count, "torch_gdn: x", "vectors"), int32_t(x.size(1)), int32_t(x.size(2))};
}

int64_t rotation_groups(int64_t vectors, int64_t D) { return ceil_div(vectors, kAuraThreads / lanes_of(int(D))); }

}  // namespace torch_gdn
