// Packed codes: the window of value d of a vector, which chooses an entry of its codebook, begins at bit d * bits of a
// little-endian stream of words. A code without a trellis ends there too. Else the stream is a ring: behind its last
// word comes the first one, and if it ends within a word, the rest of that word repeats its first bits.
#pragma once
#include <metal_stdlib>

#include "aura/parameters.h"
#include "core/fragment.h"
using namespace metal;

METAL_FUNC constexpr int words_of(int D, int code) { return (D * bits_of(code) + 31) / 32; }

// Returns the bits of the windows of `count` neighbours.
METAL_FUNC constexpr int bits_of_windows(int count, int code) { return (count - 1) * bits_of(code) + window_of(code); }

template <int code, int D>
METAL_FUNC int word_behind(int index) {
  return code > kTrellis && index + 1 == words_of(D, code) ? 0 : index + 1;
}

// Returns the window of one value. It may reach into a second word. That word is read only then.
template <int code, int D>
METAL_FUNC uint code_at(device const uint* words, int d) {
  constexpr int window = window_of(code);
  const int bit = d * bits_of(code);
  uint value = words[bit / 32] >> uint(bit % 32);
  if (32 % window != 0 && bit % 32 + window > 32) value |= words[word_behind<code, D>(bit / 32)] << uint(32 - bit % 32);
  return value & ((1u << window) - 1u);
}

// Returns the windows of 8 values, from a multiple of 8 on: 16 to 64 bits.
template <int code>
struct EightCodes {
  uint low, high;
};

template <int code, int D>
METAL_FUNC EightCodes<code> eight_codes(device const uint* words, int first) {
  constexpr int needed = bits_of_windows(8, code);
  const int bit = first * bits_of(code);
  const uint shift = uint(bit % 32);
  EightCodes<code> codes;
  codes.low = words[bit / 32];
  codes.high = 0;
  if (bit % 32 + needed > 32) codes.high = words[word_behind<code, D>(bit / 32)];
  codes.low = shift == 0 ? codes.low : codes.low >> shift | codes.high << (32u - shift);
  if (bits_of(code) == 5) codes.high >>= shift;  // the other codes need it only where the shift is 0
  return codes;
}

// Returns the windows of 4 values, from a multiple of 4 on, in the low bits: 8 to 32 bits. The 12 bits of 3-bit codes
// may straddle two words, but they lie in two bytes. With two loads, a simdgroup asks for 4/3 of the codes by bytes,
// and for 5/3 by words.
template <int code, int D>
METAL_FUNC uint four_codes(device const uint* words, int first) {
  constexpr int needed = bits_of_windows(4, code);
  const int bit = first * bits_of(code);
  if constexpr (needed == 12 && code == 3) {
    device const uchar* bytes = (device const uchar*)words + bit / 8;
    return (uint(bytes[0]) | uint(bytes[1]) << 8u) >> uint(bit % 8);
  } else {
    uint codes = words[bit / 32] >> uint(bit % 32);
    if (32 % needed != 0 && bit % 32 + needed > 32) {
      codes |= words[word_behind<code, D>(bit / 32)] << uint(32 - bit % 32);
    }
    return codes;
  }
}

// Returns the centroids of the 4 windows in the low bits.
template <int code>
METAL_FUNC float4 centroids_of(uint codes, threadgroup const float* table) {
  float4 centroids;
  UNROLL for (int i = 0; i < 4; ++i) {
    centroids[i] = table[codes >> uint(i * bits_of(code)) & (uint(entries_of(code)) - 1u)];
  }
  return centroids;
}

// Returns the centroids of codes i .. i + 3. i is a multiple of 4.
template <int code>
METAL_FUNC float4 centroids_of(EightCodes<code> codes, int i, threadgroup const float* table) {
  const int place = i * bits_of(code);
  uint four = place < 32 ? codes.low >> uint(place % 32) : codes.high;
  if (place > 0 && place < 32 && place + bits_of_windows(4, code) > 32) four |= codes.high << uint(32 - place % 32);
  return centroids_of<code>(four, table);
}

// Copies centroids or boundaries into threadgroup memory: a thread array with run-time indices would spill.
METAL_FUNC void stage_table(
    threadgroup float* table, device const float* source, int size, uint thread_index, int threads) {
  for (int i = int(thread_index); i < size; i += threads) table[i] = source[i];
}
