// What the CPU's AURA kernels share: the rotation, packed codes, and tensors seen as rows of [B, HK, T, D].
#pragma once
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "cpu/common.h"
#include "cpu/simd/layer_kernels.h"
#include "ops/aura/aura.h"

namespace torch_gdn::cpu {

constexpr int64_t kLargestD = 512;

// x <- Pi x sqrt(D), Pi = H diag(signs) / sqrt(D); the inverse is its transpose.
void rotate(float* x, const float* signs, int64_t D, bool inverse);

// The little-endian bit stream of D codes.
void pack_codes(const int32_t* codes, int64_t D, int64_t bits, int32_t* words);

// The centroids of packed vectors: from registers where the instruction set can, else by one look at a table for
// several codes at once: what a byte of the stream (6 bits of it for 3-bit codes) stands for was looked up beforehand.
class Codebook {
 public:
  Codebook(const Tensor& centroids, int64_t bits, int64_t D);
  void dequantise(const int32_t* words, float* out) const { dequantise(words, 0, 1, out, D_); }
  // Rows of words, `stride` apart, to rows of floats, `width` apart.
  void dequantise(const int32_t* words, int64_t stride, int64_t rows, float* out, int64_t width) const;

 private:
  void fill(const float* centroids);
  void look_up_row(const int32_t* words, float* out) const;
  template <int kCodes>
  void look_up_groups(const int32_t* words, float* out) const;
  int64_t bits_, D_;
  std::vector<float> groups_;  // where the instruction set has no table of its own
  CodeTable table_;
};

// The last three of at most four dimensions of rows, and of one value a row, where there are fewer or more.
Tensor as_four(const Tensor& x);
Tensor as_three(const Tensor& x);

// Any strides over the rows; a last stride other than 1 costs a copy, since words and elements are read in a row.
inline const int32_t* words_at(const Tensor& codes, int64_t b, int64_t h, int64_t t) {
  return codes.const_data_ptr<int32_t>() + b * codes.stride(0) + h * codes.stride(1) + t * codes.stride(2);
}
inline int64_t place_of(const Tensor& norms, int64_t b, int64_t h, int64_t t) {
  return b * norms.stride(0) + h * norms.stride(1) + t * norms.stride(2);
}

}  // namespace torch_gdn::cpu
