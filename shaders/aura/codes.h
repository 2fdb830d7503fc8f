// Reads packed codes. Value d of a vector has bits [d * bits, (d + 1) * bits) of a little-endian stream of words. A
// window of bits chooses the value's entry of the codebook. It begins at bit d * bits. Without a trellis it has `bits`
// bits. With a trellis it reaches into the bits of the next values, and the stream is a ring: after its last byte comes
// the first.
#pragma once
#include <metal_stdlib>

#include "aura/parameters.h"
#include "core/fragment.h"
using namespace metal;

METAL_FUNC constexpr int words_of(int D, int code) { return (D * bits_of(code) + 31) / 32; }

// Returns byte `index` of the ring of the vector whose words begin at `start`. The byte after the last one is byte 0.
template <int code, int D>
METAL_FUNC uint byte_of_ring(device const uint* words, int64_t start, uint index) {
  constexpr uint kBytes = uint(D * bits_of(code) / 8);
  static_assert(D % 8 == 0, "a ring is whole bytes");
  return ((device const uchar*)words)[start * 4 + (index == kBytes ? 0u : index)];
}

// Returns the window that lies in the low bits of `codes`.
template <int code>
METAL_FUNC uint window_in(uint codes) {
  return codes & (uint(entries_of(code)) - 1u);
}

// Returns the window of one value.
template <int code, int D>
METAL_FUNC uint code_at(device const uint* words, int d) {
  const uint bit = uint(d * bits_of(code));
  uint codes = byte_of_ring<code, D>(words, 0, bit / 8u);
  if constexpr (8 % window_of(code) != 0) codes |= byte_of_ring<code, D>(words, 0, bit / 8u + 1u) << 8u;
  return window_in<code>(codes >> bit % 8u);
}

// Holds the windows of 8 values, which take 16 to 64 bits.
template <int code>
struct EightCodes {
  uint low, high;

  // Adds the bits that follow the 8 values, because the windows of a trellis reach into them.
  METAL_FUNC void append(uint behind) {
    static_assert(bits_of(code) <= 4, "windows of 8 values take two words at most");
    if (bits_of(code) == 4) {
      high = behind;
    } else {
      low |= behind << uint(bits_of(code) * 8 % 32);
    }
  }
  // Removes the first `values` values.
  METAL_FUNC void drop(int values) {
    const ulong rest = (ulong(high) << 32 | low) >> uint(values * bits_of(code));
    low = uint(rest);
    high = uint(rest >> 32);
  }
  METAL_FUNC uint window(int i) const {
    const int place = i * bits_of(code);
    if (place >= 32) return window_in<code>(high >> uint(place - 32));
    uint codes = low >> uint(place);
    if (place + window_of(code) > 32) codes |= high << uint(32 - place);
    return window_in<code>(codes);
  }
};

// Returns the bits of values [first, first + 8) of the vector whose words begin at `start`. `first` is a multiple of 8.
// Bits that may straddle two words are loaded as bytes, so that each byte is loaded once.
template <int code>
METAL_FUNC EightCodes<code> bits_of_eight(device const uint* words, int64_t start, uint first) {
  constexpr int bits = bits_of(code);
  const uint byte = first / 8u * uint(bits);
  EightCodes<code> codes;
  codes.high = 0;
  if constexpr (bits == 2) {
    codes.low = ((device const ushort*)words)[start * 2 + first / 8u];
  } else if constexpr (bits == 4 || bits == 8) {
    codes.low = words[start + byte / 4u];
    if constexpr (bits == 8) codes.high = words[start + byte / 4u + 1u];
  } else {
    device const uchar* bytes = (device const uchar*)words + start * 4;
    codes.low = uint(bytes[byte]) | uint(bytes[byte + 1u]) << 8u | uint(bytes[byte + 2u]) << 16u;
    if constexpr (bits == 5) {
      codes.low |= uint(bytes[byte + 3u]) << 24u;
      codes.high = uint(bytes[byte + 4u]);
    }
  }
  return codes;
}

// Returns the windows of values [first, first + 8) of that vector.
template <int code, int D>
METAL_FUNC EightCodes<code> eight_codes(device const uint* words, int64_t start, uint first) {
  EightCodes<code> codes = bits_of_eight<code>(words, start, first);
  if constexpr (code > kTrellis) {
    codes.append(byte_of_ring<code, D>(words, start, (first / 8u + 1u) * uint(bits_of(code))));
  }
  return codes;
}

// Returns the windows of 8 values from their bits. Lane `next` holds the values that follow, and passes them as
// `behind`.
template <int code>
METAL_FUNC EightCodes<code> with_bits_behind(EightCodes<code> codes, EightCodes<code> behind, ushort next) {
  if constexpr (code > kTrellis) codes.append(simd_shuffle(behind.low, next));
  return codes;
}

// Returns how many lanes share `count` values of a vector. Each lane has 8 of them. If `count` is 80 or 96, the last
// lanes have none.
METAL_FUNC constexpr int lanes_of_row(int count) { return count <= 64 ? 8 : count <= 128 ? 16 : 32; }

// Divides kCount values from `first` on, of the vector that begins at `words`, among the lanes of a row, and returns
// the windows of the lane's own 8 values. Only lanes with `loads` get windows. Every lane of the simdgroup must call.
template <int code, int D, int kCount>
METAL_FUNC EightCodes<code> shared_eight(device const uint* words, int first, bool loads, uint lane) {
  constexpr int kEights = kCount / 8;
  const int own = int(lane) % lanes_of_row(kCount);
  EightCodes<code> codes{0, 0};
  if (loads) codes = bits_of_eight<code>(words, 0, uint(first + own * 8));
  codes = with_bits_behind(codes, codes, ushort(int(lane) - own + (own + 1) % kEights));
  if constexpr (kCount < D && code > kTrellis) {  // no lane holds the values that follow
    if (loads && own == kEights - 1) codes = eight_codes<code, D>(words, 0, uint(first + own * 8));
  }
  return codes;
}

// Sets `centroids` to the centroids of the 8 values.
template <int code>
METAL_FUNC void decode_eight(EightCodes<code> codes, threadgroup const float* table, thread float4* centroids) {
  UNROLL for (int i = 0; i < 8; ++i) centroids[i / 4][i % 4] = table[codes.window(i)];
}

// Copies centroids or boundaries into threadgroup memory, because a thread array with run-time indices would spill.
METAL_FUNC void stage_table(
    threadgroup float* table, device const float* source, int size, uint thread_index, int threads) {
  for (int i = int(thread_index); i < size; i += threads) table[i] = source[i];
}
