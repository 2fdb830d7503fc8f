// Tensors to parameter blocks of the kernels of pages.
#pragma once
#include "metal/parameters.h"
#include "shaders/attention/parameters.h"

namespace torch_gdn {

inline PageStrides page_strides(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(2)}; }
inline TokenStrides token_strides(const Tensor& x) { return {x.stride(0), x.stride(1)}; }

}  // namespace torch_gdn
