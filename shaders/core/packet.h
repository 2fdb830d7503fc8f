// Neighbouring elements that a thread loads at once and computes with in f32. The host picks 4 where offset and strides
// of every row allow it, else 1.
#pragma once
#include "core/fragment.h"

template <int Packet>
struct Values {
  static_assert(Packet == 1 || Packet == 4, "a packet holds 1 or 4 elements");
  float at[Packet];
};

template <int Packet>
METAL_FUNC Values<Packet> no_values() {
  Values<Packet> values;
  UNROLL for (int i = 0; i < Packet; ++i) values.at[i] = 0.0f;
  return values;
}

template <int Packet, typename T>
METAL_FUNC Values<Packet> load_values(device const T* source) {
  Values<Packet> values;
  if constexpr (Packet == 4) {
    const vec<T, 4> packet = *(device const vec<T, 4>*)source;
    UNROLL for (int i = 0; i < 4; ++i) values.at[i] = float(packet[i]);
  } else {
    values.at[0] = float(source[0]);
  }
  return values;
}

template <typename T, int Packet>
METAL_FUNC void store_values(device T* target, Values<Packet> values) {
  if constexpr (Packet == 4) {
    vec<T, 4> packet;
    UNROLL for (int i = 0; i < 4; ++i) packet[i] = T(values.at[i]);
    *(device vec<T, 4>*)target = packet;
  } else {
    target[0] = T(values.at[0]);
  }
}
