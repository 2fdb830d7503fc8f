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
  const int own = int(min(row, int64_t(rows - 1)));
  return {own, own / heads / tokens, own / heads % tokens, own % heads, row < rows};
}

METAL_FUNC int64_t offset_of(constant RowStrides& strides, int64_t batch, int64_t token, int64_t head) {
  return batch * strides.batch + token * strides.token + head * strides.head;
}

METAL_FUNC int64_t offset_of(constant RowStrides& strides, RowIndex index) {
  return offset_of(strides, index.batch, index.token, index.head);
}
