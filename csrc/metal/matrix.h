// Binds matrices of weights in the form that kernels read.
#pragma once
#include "metal/parameters.h"
#include "ops/quantized/packed.h"
#include "shaders/core/parameters.h"

namespace torch_gdn {

// weight is [rows, columns], or [E, rows, columns] for experts. It is packed if it has scales.
MatrixParameters matrix_parameters(const Tensor& weight, const std::optional<Tensor>& scales,
                                   const std::optional<Tensor>& biases, const Packing& packing);

// Returns the template argument Bits of a kernel. Weights that are not packed have no such argument.
inline TemplateArgument bits_of(const Packing& packing) {
  if (packing.is_e4m3) return int(kE4M3);
  if (packing.is_e2m1) return int(kE2M1);
  return packing.bits == 0 ? TemplateArgument() : TemplateArgument(packing.bits);
}

}  // namespace torch_gdn
