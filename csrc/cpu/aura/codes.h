// Packed codes: a little-endian bit stream of D codes in 32-bit words.
#pragma once
#include <vector>

#include "cpu/simd/aura_kernels.h"
#include "ops/check.h"

namespace torch_gdn::cpu {

void pack_codes(const int32_t* codes, int64_t D, int64_t bits, int32_t* words);

// Packed vectors -> centroids: from registers where the ISA can, else from a table with the centroids of each value
// that a byte (6 bits with 3-bit codes) may have, several codes at once.
class Codebook {
 public:
  Codebook(const Tensor& centroids, int64_t bits, int64_t D);
  void dequantise(const int32_t* words, float* out) const { dequantise(words, 0, 1, out, D_); }
  // Rows of words, `stride` apart, to rows of floats, `width` apart.
  void dequantise(const int32_t* words, int64_t stride, int64_t rows, float* out, int64_t width) const;

 private:
  void fill_table(const float* centroids);
  void fill_groups(const float* centroids);
  void dequantise_row(const int32_t* words, float* out) const;
  template <int kCodes>
  void dequantise_groups(const int32_t* words, float* out) const;
  int64_t bits_, D_;
  std::vector<float> groups_;  // without an ISA's kernel
  CodeTable table_;            // with one
};

}  // namespace torch_gdn::cpu
