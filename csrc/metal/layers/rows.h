#pragma once
#include "metal/parameters.h"

namespace torch_gdn {

// Returns x as [B, T, H, D] with a last stride of 1. A tensor with more dimensions is made contiguous.
inline Tensor as_rows(const Tensor& x, const char* name) {
  Tensor rows = unit_last_stride(x, name);
  while (rows.dim() < 4) rows = rows.unsqueeze(0);
  return rows.dim() > 4 ? as_contiguous(rows, name).view({1, -1, 1, rows.size(-1)}) : rows;
}

// Returns the grid of a kernel whose rows are those of x [B, T, heads, D].
template <typename Parameters>
Parameters row_parameters(const Tensor& x, const char* argument) {
  Parameters parameters{};
  parameters.rows = int32_count(x.size(0) * x.size(1) * x.size(2), argument, "rows");
  parameters.tokens = int32_t(x.size(1));
  parameters.heads = int32_t(x.size(2));
  parameters.x = row_strides(x);
  return parameters;
}

}  // namespace torch_gdn
