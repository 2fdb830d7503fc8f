// Reads index tensors of dtype int32 or int64.
#pragma once
#include <metal_stdlib>
using namespace metal;

// `bytes` is the size of one index, 4 or 8.
METAL_FUNC int64_t read_index(device const int* indices, int64_t at, int bytes) {
  if (bytes == 4) return indices[at];
  return ((device const int64_t*)indices)[at];
}
