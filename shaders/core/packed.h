// Decodes packed weights: codes of 4 or 8 bits, e4m3 numbers (Bits is kE4M3), and e2m1 numbers (kE2M1).
//
// A code stands for w[k] = scale * code[k] + bias. A word holds per = 32 / Bits codes. Code k of a
// row has bits k % per * Bits of word k / per. A weight is computed as
//   w = scale * (code - middle) + (bias + scale * middle)
// The second term is exactly 0 for symmetric codes, so such a weight is rounded once. A zero point stands for the bias
// -scale * zero point.
//
// Two codes become two halves without a conversion. The codes of a word form pairs whose members are 16 bits apart. The
// bits of a pair start at bit 0 or bit 4 of each half-word. An OR with the bits of 1024, whose last place is 1, gives
// 1024 + code * 2^position. Dividing by 2^position and subtracting is exact.
//
// Two e4m3 numbers become two halves in the same way. Exponent and mantissa move to those of a half, whose exponent is
// 8 more, so that the half is 2^-8 of the number, also without an exponent. The byte 0x7f is NaN, and so is 0xff. For
// e2m1, which lie as codes of 4 bits do, the half is 2^-14 of the number. Their scales are powers of two.
#pragma once
#include "core/elements.h"
#include "core/parameters.h"
#include "core/vectors.h"

template <int Bits>
METAL_FUNC constexpr int bits_of_code() {
  return Bits == kE4M3 ? 8 : Bits;
}

template <>
METAL_FUNC constexpr int bits_of_code<kE2M1>() {
  return 4;
}

// Numbers have scales and no biases.
template <int Bits>
METAL_FUNC constexpr bool are_numbers() {
  return Bits == kE4M3 || Bits == kE2M1;
}

// Decodes bytes 0 and 2.
METAL_FUNC vec<half, 2> decode_e4m3(uint bytes) {
  const uint magnitudes = bytes & 0x007f007fu;
  const uint nans = ((magnitudes + 0x00010001u) & 0x00800080u) * 0xf8u;  // the exponent of NaN, for 0x7f
  const uint bits = (magnitudes << 7) | ((bytes & 0x00800080u) << 8) | nans;
  return as_type<vec<half, 2>>(bits) * vec<half, 2>(half(256.0f));
}

// Decodes bits 0 to 3 and 16 to 19.
METAL_FUNC vec<half, 2> decode_e2m1(uint codes) {
  const uint bits = ((codes & 0x00070007u) << 9) | ((codes & 0x00080008u) << 12);
  return as_type<vec<half, 2>>(bits) * vec<half, 2>(half(16384.0f));
}

// Returns 2^(exponent - 127), and NaN for 255.
METAL_FUNC float decode_e8m0(uchar exponent) {
  const uint bits = exponent == 0 ? 0x00400000u : exponent == 255 ? 0x7fc00000u : uint(exponent) << 23;
  return as_type<float>(bits);
}

// The scale of a group of codes, and the second term of the formula.
template <int Bits, bool AreNumbers = are_numbers<Bits>()>
struct ScaleAndRest {
  float scale, rest;

  METAL_FUNC void set(float own_scale, float bias) {
    scale = own_scale;
    rest = fma(scale, float(1 << (Bits - 1)), bias);
  }

  METAL_FUNC void set(float own_scale, uchar zero_point) {
    scale = own_scale;
    rest = scale * float((1 << (Bits - 1)) - int(zero_point));
  }

  METAL_FUNC float weight(float number) const { return fma(number, scale, rest); }

  // Returns the product with a vector x, from the sum of numbers * x and the sum of x.
  METAL_FUNC float product(float unscaled, float total) const { return fma(scale, unscaled, rest * total); }
};

template <int Bits>
struct ScaleAndRest<Bits, true> {
  float scale;

  METAL_FUNC float weight(float number) const { return scale * number; }
  METAL_FUNC float product(float unscaled, float) const { return scale * unscaled; }
};

// Holds `Columns` codes as they lie in memory. The first column is a multiple of 8.
template <int Bits, int Columns>
struct Codes {
  GDN_CONSTANT int kBits = bits_of_code<Bits>();
  static_assert(kBits == 4 || kBits == 8, "a word holds 8 or 4 codes");
  static_assert(Columns % 8 == 0 && Columns * kBits <= 128, "at most 16 bytes");
  GDN_CONSTANT int kWords = Columns * kBits / 32;
  GDN_CONSTANT int kPairs = 16 / kBits;  // per word; pair i has columns i and i + kPairs of the word
  uint words[kWords];

  // If Width is 4, rows start at multiples of 16 bytes, so that one load takes all words.
  template <int Width>
  METAL_FUNC void load(device const uint* source) {
    if constexpr (Width == 4 && kWords > 1) {
      const vec<uint, kWords> loaded = *(device const vec<uint, kWords>*)source;
      UNROLL for (int i = 0; i < kWords; ++i) words[i] = loaded[i];
    } else {
      UNROLL for (int i = 0; i < kWords; ++i) words[i] = source[i];
    }
  }

  // Loads bytes of which `left` belong to the row. The others become 0.
  template <int Width>
  METAL_FUNC void load(device const uchar* source, int left) {
    if constexpr (Width == 4) {
      load<Width>((device const uint*)source);
    } else {
      UNROLL for (int i = 0; i < kWords; ++i) {
        words[i] = 0;
        UNROLL for (int byte = 0; byte < 4; ++byte) {
          if (i * 4 + byte < left) words[i] |= uint(source[i * 4 + byte]) << uint(8 * byte);
        }
      }
    }
  }

  // Decodes a pair to code - middle, or to numbers. After unrolling, the compiler knows the arguments of these
  // functions.
  METAL_FUNC vec<half, 2> pair(int word, int i) const {
    if constexpr (Bits == kE4M3) return decode_e4m3(words[word] >> uint(i * 8));
    if constexpr (Bits == kE2M1) return decode_e2m1(words[word] >> uint(i * 4));
    constexpr uint kMask = (1u << Bits) - 1u;
    const int position = i * Bits % 8;
    const uint codes = (words[word] >> uint(i * Bits - position)) & ((kMask | kMask << 16) << uint(position));
    const vec<half, 2> numbers = as_type<vec<half, 2>>(codes | 0x64006400u);
    const float unit = 1.0f / float(1 << position);
    return fma(numbers, vec<half, 2>(half(unit)), vec<half, 2>(half(-1024.0f * unit - float(1 << (Bits - 1)))));
  }

  // Decodes pairs 2 step and 2 step + 1 to code - middle. The result has 4 columns in the order of pairs.
  METAL_FUNC Values<4> numbers(int step) const {
    Values<4> result;
    UNROLL for (int i = 0; i < 2; ++i) {
      const int number = step * 2 + i;
      const vec<half, 2> decoded = pair(number / kPairs, number % kPairs);
      result.at[2 * i] = float(decoded.x);
      result.at[2 * i + 1] = float(decoded.y);
    }
    return result;
  }

  // Decodes the weights of columns 4 step .. 4 step + 3.
  METAL_FUNC Values<4> weights(int step, ScaleAndRest<Bits> own) const {
    Values<4> result;
    UNROLL for (int i = 0; i < 4; ++i) {
      const int column = (step * 4 + i) % (2 * kPairs);
      const vec<half, 2> decoded = pair((step * 4 + i) / (2 * kPairs), column % kPairs);
      result.at[i] = own.weight(float(column < kPairs ? decoded.x : decoded.y));
    }
    return result;
  }
};

// The vector ends after `left` elements. Only rows of e4m3 numbers end within a word; the other elements are then
// zeros.
template <int Bits, int Width, typename T>
METAL_FUNC vec<T, 4> load_four(device const T* source, int left) {
  if constexpr (Width == 4) {
    return *(device const vec<T, 4>*)source;
  } else if constexpr (Bits == kE4M3) {
    vec<T, 4> result = vec<T, 4>(T(0));
    UNROLL for (int i = 0; i < 4; ++i) {
      if (i < left) result[i] = source[i];
    }
    return result;
  } else {
    return vec<T, 4>(source[0], source[1], source[2], source[3]);
  }
}

// Loads the elements of a vector that are multiplied by a word's codes, in the order of Codes::numbers. The vector ends
// after `left` elements.
template <int Bits, int Width, typename T>
METAL_FUNC void load_for_word(thread T* result, device const T* source, int word, int left) {
  if constexpr (bits_of_code<Bits>() == 8) {
    const vec<T, 4> all = load_four<Bits, Width>(source + word * 4, left - word * 4);
    result[0] = all.x, result[1] = all.z, result[2] = all.y, result[3] = all.w;
  } else {
    const vec<T, 4> lower = load_four<Bits, Width>(source + word * 8, left);
    const vec<T, 4> upper = load_four<Bits, Width>(source + word * 8 + 4, left);
    result[0] = lower.x, result[1] = upper.x, result[2] = lower.y, result[3] = upper.y;
    result[4] = lower.z, result[5] = upper.z, result[6] = lower.w, result[7] = upper.w;
  }
}
