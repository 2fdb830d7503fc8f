// Reads packed weights as f32 on the CPU.
#pragma once
#include "ops/quantized/packed.h"

namespace torch_gdn::cpu {

// Reads the rows of a packed matrix in f32: codes [N, words] with scales and biases [N, groups], or e4m3 numbers [N,
// K].
class PackedRows {
 public:
  PackedRows(const Tensor& weight, const Tensor& scales, const optional<Tensor>& biases, const Packing& packing);

  int64_t columns() const { return columns_; }
  void dequantize(int64_t row, float* target) const;

 private:
  Tensor weight_, scales_, biases_;
  Packing packing_;
  int64_t columns_;
};

// Returns all rows as [N, K] in f32.
Tensor dequantized(const Tensor& weight, const Tensor& scales, const optional<Tensor>& biases, const Packing& packing);

}  // namespace torch_gdn::cpu
