// Rows [B, T, H], one after another. Their number is an int32: a division by a run-time number of 64 bits takes over a
// thousand instructions.
#pragma once
#include "core/parameters.h"

struct RowIndex {
  int batch, token, head;
};

METAL_FUNC RowIndex row_index(uint row, int tokens, int heads) {
  const uint whole = row / uint(heads);
  RowIndex index;
  index.batch = int(whole / uint(tokens));
  index.token = int(whole % uint(tokens));
  index.head = int(row % uint(heads));
  return index;
}

METAL_FUNC int64_t offset_of(constant RowStrides& strides, RowIndex index) {
  return index.batch * strides.batch + index.token * strides.token + index.head * strides.head;
}
