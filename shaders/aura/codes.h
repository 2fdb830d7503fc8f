// Packed codes: code d of a vector takes bits [d * bits, (d + 1) * bits) of a little-endian stream of words.
#pragma once
#include <metal_stdlib>

#include "core/fragment.h"
using namespace metal;

METAL_FUNC constexpr int words_of(int D, int bits) { return (D * bits + 31) / 32; }

// With 3 bits a code may reach into a second word, which is read only then.
template <int bits>
METAL_FUNC uint code_at(device const uint* words, int d) {
  const int bit = d * bits;
  uint value = words[bit / 32] >> uint(bit % 32);
  if (32 % bits != 0 && bit % 32 + bits > 32) value |= words[bit / 32 + 1] << uint(32 - bit % 32);
  return value & ((1u << bits) - 1u);
}

// Centroids or boundaries into threadgroup memory: a thread array with run-time indices would spill.
METAL_FUNC void stage_table(
    threadgroup float* table, device const float* source, int size, uint thread_index, int threads) {
  for (int i = int(thread_index); i < size; i += threads) table[i] = source[i];
}
