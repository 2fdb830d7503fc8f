// Packed codes are a little-endian bit stream of D codes in 32-bit words. If a trellis code's stream ends within a
// word, the rest of the word repeats its first bits.
#pragma once
#include <vector>

#include "cpu/simd/aura_kernels.h"
#include "ops/aura/aura.h"

namespace torch_gdn::cpu {

void pack_codes(const int32_t* codes, int64_t D, const Code& code, int32_t* words);

// Turns packed vectors into centroids. If the ISA has a kernel, it reads centroids from registers. Otherwise a table
// has the centroids for each value of the bits of two codes, so that one look-up gives both, or of one code of 8 bits.
class Codebook {
 public:
  Codebook(const Tensor& centroids, const Code& code, int64_t D);
  void dequantise(const int32_t* words, float* out) const { dequantise(words, 0, 1, out, D_); }
  // Decodes rows of words, `stride` apart, into rows of floats, `width` apart.
  void dequantise(const int32_t* words, int64_t stride, int64_t rows, float* out, int64_t width) const;

 private:
  void fill_table(const float* centroids);
  void fill_groups(const float* centroids);
  void dequantise_row(const int32_t* words, float* out) const;
  template <int kBits>
  void dequantise_pairs(const int32_t* words, float* out) const;
  Code code_;
  int64_t D_;
  std::vector<float> groups_;  // if the ISA has no kernel
  CodeTable table_;            // if it has one
};

}  // namespace torch_gdn::cpu
