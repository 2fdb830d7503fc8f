// Packed codes of 4 or 8 bits: w[k] = scale * code[k] + bias, where code k of a row has bits k % per * Bits of word
// k / per, per = 32 / Bits codes a word. A weight is computed as
//   w = scale * (code - middle) + (bias + scale * middle)
// because the second term is exactly 0 for symmetric codes, so that a weight is rounded once. A zero point stands for
// the bias -scale * zero point.
//
// A code becomes a number without a shift and without a conversion. If the code's bits lie within the low 16, they are
// or-ed to the bits of 2^23, whose last place is 1. This gives 2^23 + code * 2^position. Subtracting 2^23 + middle *
// 2^position is exact, and a scale divided by 2^position makes up for the position.
#pragma once
#include "core/elements.h"
#include "core/vectors.h"

// The scale of a group's codes for each position within 16 bits, and the second term of the formula.
template <int Bits>
struct ScaleAndRest {
  GDN_CONSTANT int kPositions = 16 / Bits;
  float scales[kPositions];
  float rest;

  METAL_FUNC void set(float scale, float bias) {
    rest = fma(scale, float(1 << (Bits - 1)), bias);
    set_scales(scale);
  }

  METAL_FUNC void set(float scale, uchar zero_point) {
    rest = scale * float((1 << (Bits - 1)) - int(zero_point));
    set_scales(scale);
  }

  METAL_FUNC void set_scales(float scale) {
    UNROLL for (int i = 0; i < kPositions; ++i) scales[i] = scale * (1.0f / float(1 << (i * Bits)));
  }
};

// `Columns` codes, starting at a multiple of 8, as they lie in memory.
template <int Bits, int Columns>
struct Codes {
  static_assert(Bits == 4 || Bits == 8, "a word holds 8 or 4 codes");
  static_assert(Columns % 8 == 0 && Columns * Bits <= 128, "at most 16 bytes");
  GDN_CONSTANT int kWords = Columns * Bits / 32;
  uint words[kWords];

  // With a Width of 4, rows start at multiples of 16 bytes, so that one load takes all words.
  template <int Width>
  METAL_FUNC void load(device const uint* source) {
    if constexpr (Width == 4 && kWords > 1) {
      const vec<uint, kWords> loaded = *(device const vec<uint, kWords>*)source;
      UNROLL for (int i = 0; i < kWords; ++i) words[i] = loaded[i];
    } else {
      UNROLL for (int i = 0; i < kWords; ++i) words[i] = source[i];
    }
  }

  // Decodes columns 4 step .. 4 step + 3. After unrolling, step is a compile-time number.
  METAL_FUNC Values<4> values(int step, ScaleAndRest<Bits> own) const {
    Values<4> found;
    UNROLL for (int i = 0; i < 4; ++i) {
      const int bit = (step * 4 + i) * Bits;
      const int position = bit % 16;
      const uint half_word = words[bit / 32] >> uint(bit % 32 - position);
      const uint code = half_word & (((1u << Bits) - 1u) << uint(position));
      const float number = as_type<float>(code | 0x4b000000u) - float((1 << 23) + (1 << (Bits - 1 + position)));
      found.at[i] = fma(number, own.scales[position / Bits], own.rest);
    }
    return found;
  }
};
