// Reads tensors as vectors [B, H, T, ..], for the CPU's AURA kernels.
#pragma once
#include <ATen/Parallel.h>

#include <cmath>

#include "cpu/common.h"

namespace torch_gdn::cpu {

constexpr int64_t kLargestD = 512;

// Computes x <- factor sqrt(D) Pi x, or factor sqrt(D) Pi^T x if `inverse`, with Pi = H diag(signs) / sqrt(D).
void rotate(float* x, const Tensor& signs, bool inverse, float factor);
inline float inverse_root(int64_t D) { return 1.0f / std::sqrt(static_cast<float>(D)); }

inline Tensor with_dimensions(Tensor x, int64_t count) {
  while (x.dim() < count) x = x.unsqueeze(0);
  return x.dim() == count ? x : x.flatten(0, x.dim() - count);
}

// Returns x as vectors [.., D], or as single values [..]. Missing dimensions have size 1, and surplus dimensions are
// merged. The elements of a vector must be adjacent, so a last stride other than 1 costs a copy.
inline Tensor as_vectors(const Tensor& x, const char* name) { return with_dimensions(unit_last_stride(x, name), 4); }
inline Tensor as_values(const Tensor& x) { return with_dimensions(x, 3); }

inline int64_t offset_of(const Tensor& x, int64_t b, int64_t h, int64_t t) {
  return b * x.stride(0) + h * x.stride(1) + t * x.stride(2);
}
inline const int32_t* words_at(const Tensor& codes, int64_t b, int64_t h, int64_t t) {
  return codes.const_data_ptr<int32_t>() + offset_of(codes, b, h, t);
}
inline float norm_at(const Tensor& norms, int64_t b, int64_t h, int64_t t) {
  return norms.const_data_ptr<c10::Half>()[offset_of(norms, b, h, t)];
}
// A norm that float16 cannot hold becomes inf.
inline void set_norm(const Tensor& norms, int64_t b, int64_t h, int64_t t, float norm) {
  norms.mutable_data_ptr<c10::Half>()[offset_of(norms, b, h, t)] = norm;
}

// Calls f(b, h, t) for each vector, in parallel.
template <typename F>
void for_each_vector(const Tensor& x, const F& f) {
  const int64_t heads = x.size(1), tokens = x.size(2);
  at::parallel_for(0, x.size(0) * heads * tokens, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i / tokens / heads, i / tokens % heads, i % tokens);
  });
}

}  // namespace torch_gdn::cpu
