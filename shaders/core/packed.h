// Packed codes of 4 or 8 bits: w[k] = scale * code[k] + bias, where code k of a row has bits k % per * Bits of word
// k / per, per = 32 / Bits codes a word. A weight is computed as scale * (code - middle) + (bias + scale * middle):
// where codes are symmetric, the second term is exactly 0, so that a weight is rounded once. A code less its middle is
// the code with its highest bit inverted, read as a signed number.
#pragma once
#include "core/elements.h"
#include "core/vectors.h"

// What weights need beside their codes.
struct ScaleAndRest {
  float scale, rest;
};

template <int Bits>
METAL_FUNC ScaleAndRest scale_and_rest(float scale, float bias) {
  ScaleAndRest found;
  found.scale = scale;
  found.rest = fma(scale, float(1 << (Bits - 1)), bias);
  return found;
}

// `Columns` codes from a multiple of 8 on, as they lie in memory.
template <int Bits, int Columns>
struct Codes {
  static_assert(Bits == 4 || Bits == 8, "a word holds 8 or 4 codes");
  static_assert(Columns % 8 == 0 && Columns * Bits <= 128, "at most 16 bytes");
  GDN_CONSTANT int kWords = Columns * Bits / 32;
  uint words[kWords];

  // Width of 4: rows start at multiples of 16 bytes, so that one load takes them all.
  template <int Width>
  METAL_FUNC void load(device const uint* source) {
    if constexpr (Width == 4 && kWords > 1) {
      const vec<uint, kWords> loaded = *(device const vec<uint, kWords>*)source;
      UNROLL for (int i = 0; i < kWords; ++i) words[i] = loaded[i];
    } else {
      UNROLL for (int i = 0; i < kWords; ++i) words[i] = source[i];
    }
    UNROLL for (int i = 0; i < kWords; ++i) words[i] ^= Bits == 4 ? 0x88888888u : 0x80808080u;
  }

  // Decodes columns 4 step .. 4 step + 3. After unrolling, step is a compile-time number.
  METAL_FUNC Values<4> values(int step, ScaleAndRest own) const {
    const int bit = step * 4 * Bits;
    Values<4> found;
    UNROLL for (int i = 0; i < 4; ++i) {
      const int above = 32 - Bits - (bit % 32 + i * Bits);  // bits above the code in its word
      found.at[i] = fma(float(int(words[bit / 32] << uint(above)) >> (32 - Bits)), own.scale, own.rest);
    }
    return found;
  }
};
