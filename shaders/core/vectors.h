// Reads rows with 4 elements per load if the offset and strides of every row allow it, and otherwise with 1. The host
// decides.
#pragma once
#include "core/fragment.h"

// Names vec<T, Width>. Metal defines vec for widths from 2 on.
template <typename T, int Width>
struct VectorOf {
  static_assert(Width == 2 || Width == 4, "a vector holds 1, 2 or 4 elements");
  typedef vec<T, Width> type;
};
template <typename T>
struct VectorOf<T, 1> {
  typedef T type;
};

// A vector of T, converted to f32 for arithmetic.
template <int Width>
struct Values {
  static_assert(Width == 1 || Width == 4, "a vector holds 1 or 4 elements");
  float at[Width];
};

template <int Width>
METAL_FUNC Values<Width> no_values() {
  Values<Width> values;
  UNROLL for (int i = 0; i < Width; ++i) values.at[i] = 0.0f;
  return values;
}

// Rounds to T and converts back.
template <typename T, int Width>
METAL_FUNC Values<Width> rounded(Values<Width> values) {
  UNROLL for (int i = 0; i < Width; ++i) values.at[i] = float(T(values.at[i]));
  return values;
}

template <int Width, typename T>
METAL_FUNC Values<Width> load_values(device const T* source) {
  Values<Width> values;
  if constexpr (Width == 4) {
    const vec<T, 4> loaded = *(device const vec<T, 4>*)source;
    UNROLL for (int i = 0; i < 4; ++i) values.at[i] = float(loaded[i]);
  } else {
    values.at[0] = float(source[0]);
  }
  return values;
}

template <typename T, int Width>
METAL_FUNC void store_values(device T* target, Values<Width> values) {
  if constexpr (Width == 4) {
    vec<T, 4> rounded;
    UNROLL for (int i = 0; i < 4; ++i) rounded[i] = T(values.at[i]);
    *(device vec<T, 4>*)target = rounded;
  } else {
    target[0] = T(values.at[0]);
  }
}
