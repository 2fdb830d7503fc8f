#pragma once
#include "metal/parameters.h"

namespace torch_gdn {

// As [B, T, H, D], last stride 1; contiguous where it has more dimensions.
inline Tensor as_rows(const Tensor& x, const char* name) {
  Tensor rows = unit_last_stride(x, name);
  while (rows.dim() < 4) rows = rows.unsqueeze(0);
  return rows.dim() > 4 ? as_contiguous(rows, name).view({1, -1, 1, rows.size(-1)}) : rows;
}

}  // namespace torch_gdn
