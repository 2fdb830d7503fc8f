// Reads packed weights as f32 on the CPU.
#pragma once
#include "ops/quantized/packed.h"

namespace torch_gdn::cpu {

// Reads the rows of a packed matrix in f32. The weight is [N, words], and scales and biases are [N, groups].
class PackedRows {
 public:
  PackedRows(const Tensor& weight, const Tensor& scales, const Tensor& biases, int64_t bits, int64_t group);

  int64_t columns() const { return columns_; }
  void dequantize(int64_t row, float* target) const;

 private:
  Tensor weight_, scales_, biases_;
  int64_t bits_, group_, columns_;
};

// Returns all rows as [N, K] in f32.
Tensor dequantized(const Tensor& weight, const Tensor& scales, const Tensor& biases, const Packing& packing);

}  // namespace torch_gdn::cpu
