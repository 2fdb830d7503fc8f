// Packed codes: code d of a vector takes bits [d * bits, (d + 1) * bits) of a little-endian stream of words.
#pragma once
#include <metal_stdlib>

#include "core/fragment.h"
using namespace metal;

METAL_FUNC constexpr int words_of(int D, int bits) { return (D * bits + 31) / 32; }

// A 3-bit code may reach into a second word. That word is read only then.
template <int bits>
METAL_FUNC uint code_at(device const uint* words, int d) {
  const int bit = d * bits;
  uint value = words[bit / 32] >> uint(bit % 32);
  if (32 % bits != 0 && bit % 32 + bits > 32) value |= words[bit / 32 + 1] << uint(32 - bit % 32);
  return value & ((1u << bits) - 1u);
}

// 8 codes: 16, 24, 32 or 64 bits.
template <int bits>
struct EightCodes {
  uint low, high;
};

// Returns 8 codes, from a multiple of 8 on, of the vector whose words begin at `start`. All indices have 32 bits, so
// that a simdgroup adds to one address. 24 bits may straddle two words, so they come as bytes: each is asked for once.
template <int bits>
METAL_FUNC EightCodes<bits> eight_codes(device const uint* words, uint start, uint first) {
  EightCodes<bits> codes;
  codes.high = 0;
  if constexpr (bits == 2) {
    codes.low = ((device const ushort*)words)[start * 2u + first / 8u];
  } else if constexpr (bits == 3) {
    device const uchar* bytes = (device const uchar*)words;
    const uint byte = start * 4u + first / 8u * 3u;
    codes.low = uint(bytes[byte]) | uint(bytes[byte + 1u]) << 8u | uint(bytes[byte + 2u]) << 16u;
  } else {
    codes.low = words[start + first / 8u * uint(bits / 4)];
    if constexpr (bits == 8) codes.high = words[start + first / 8u * 2u + 1u];
  }
  return codes;
}

// Sets centroids[i] to the centroid of code i of 8.
template <int bits>
METAL_FUNC void decode_eight(EightCodes<bits> codes, threadgroup const float* table, thread float* centroids) {
  UNROLL for (int i = 0; i < 8; ++i) {
    const int place = i * bits;
    const uint word = place < 32 ? codes.low : codes.high;
    centroids[i] = table[word >> uint(place % 32) & ((1u << bits) - 1u)];
  }
}

// Returns 4 codes in the low bits, from a multiple of 4 on, of the vector whose words begin at `start`. Of 3 bits, two
// loads of bytes ask for 4/3 of the codes, where words would ask for 5/3.
template <int bits>
METAL_FUNC uint four_codes(device const uint* words, uint start, uint first) {
  if constexpr (bits == 8) {
    return words[start + first / 4u];
  } else if constexpr (bits == 4) {
    return ((device const ushort*)words)[start * 2u + first / 4u];
  } else {
    device const uchar* bytes = (device const uchar*)words + start * 4u;
    const uint bit = first * uint(bits);
    if constexpr (bits == 2) return bytes[bit / 8u];
    return (uint(bytes[bit / 8u]) | uint(bytes[bit / 8u + 1u]) << 8u) >> (bit % 8u);
  }
}

// Returns the centroids of the 4 codes in the low bits.
template <int bits>
METAL_FUNC float4 centroids_of(uint codes, threadgroup const float* table) {
  float4 centroids;
  UNROLL for (int i = 0; i < 4; ++i) centroids[i] = table[codes >> uint(i * bits) & ((1u << bits) - 1u)];
  return centroids;
}

// Returns the centroids of codes i .. i + 3. i is a multiple of 4.
template <int bits>
METAL_FUNC float4 centroids_of(EightCodes<bits> codes, int i, threadgroup const float* table) {
  const int place = i * bits;
  return centroids_of<bits>(place < 32 ? codes.low >> uint(place % 32) : codes.high, table);
}

// Copies centroids or boundaries into threadgroup memory: a thread array with run-time indices would spill.
METAL_FUNC void stage_table(
    threadgroup float* table, device const float* source, int size, uint thread_index, int threads) {
  for (int i = int(thread_index); i < size; i += threads) table[i] = source[i];
}
