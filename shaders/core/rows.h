// Enumerates the rows of [B, T, H]. Their number is an int32, because a division by a 64-bit number that is known only
// at run time takes over a thousand instructions.
#pragma once
#include <metal_stdlib>

#include "core/parameters.h"
using namespace metal;

// Threads past the last row get the last row, and is_present is false for them.
struct RowIndex {
  int row, batch, token, head;
  bool is_present;
};

METAL_FUNC RowIndex row_index(int64_t row, int rows, int tokens, int heads) {
  RowIndex index;
  index.is_present = row < rows;
  index.row = int(min(row, int64_t(rows - 1)));
  index.batch = index.row / heads / tokens;
  index.token = index.row / heads % tokens;
  index.head = index.row % heads;
  return index;
}

METAL_FUNC int64_t offset_of(constant RowStrides& strides, RowIndex index) {
  return index.batch * strides.batch + index.token * strides.token + index.head * strides.head;
}
