// Both encoders use these functions to find a vector's direction and slot, and to pack the words of its codes.
#pragma once
#include "aura/codes.h"
#include "aura/parameters.h"
#include "aura/rotation.h"
#include "core/error.h"
#include "core/indices.h"

// Returns the slot of a vector. A vector with a negative slot is not stored.
METAL_FUNC int64_t slot_of(device const int* slots, constant EncodeParameters& parameters, VectorPlace place) {
  if (!place.present) return -1;
  if (parameters.slot_bytes == 0) return place.token;
  const int64_t entry = place.batch * parameters.slot_batch + place.token * parameters.slot_token;
  return read_index(slots, entry, parameters.slot_bytes);
}

// Returns the exponent bits of the largest element. If the elements are divided by that power of two, their squares
// neither overflow nor vanish.
template <int D>
METAL_FUNC uint exponent_of_largest(thread const float* values) {
  float largest = 0.0f;
  UNROLL for (int i = 0; i < D / lanes_of(D); ++i) largest = fmax(largest, fabs(values[i]));
  return clamp((as_type<uint>(max_over_lanes<D>(largest)) >> 23) & 255u, 1u, 253u);
}

template <int D>
METAL_FUNC float sum_of_squares(thread const float* values) {
  float sum = 0.0f;
  UNROLL for (int i = 0; i < D / lanes_of(D); ++i) sum = fma(values[i], values[i], sum);
  return sum_over_lanes<D>(sum);
}

// A vector's length is norm * grow.
struct Length {
  float norm, grow;
};

// Reads a vector and subtracts the mean of its slot's tile.
template <int D, typename T>
METAL_FUNC void read_vector(
    thread float* values,
    device const T* x,
    device const half* tile_means,
    constant EncodeParameters& parameters,
    VectorPlace place,
    int64_t slot,
    uint lane) {
  constexpr int kOwn = D / lanes_of(D);
  device const T* source = x + offset_of(parameters.x, place.batch, place.head, place.token);
  UNROLL for (int i = 0; i < kOwn; ++i) values[i] = float(source[place_of<D>(i, lane)]);
  if (parameters.has_tile_means == 0 || slot < 0 || slot >= parameters.capacity) return;
  device const half* mean =
      tile_means + offset_of(parameters.tile_means, place.batch, place.head, int(slot) / kTokensOfTile);
  UNROLL for (int i = 0; i < kOwn; ++i) values[i] -= float(mean[place_of<D>(i, lane)]);
}

// Replaces a vector by its direction (the vector divided by its norm), rotated.
template <int D>
METAL_FUNC Length find_direction(thread float* values, device const float* signs, uint lane) {
  constexpr int kOwn = D / lanes_of(D);
  const uint exponent = exponent_of_largest<D>(values);
  const float shrink = as_type<float>((254u - exponent) << 23);
  UNROLL for (int i = 0; i < kOwn; ++i) values[i] *= shrink;
  const float norm = sqrt(sum_of_squares<D>(values));
  rotate<D, false>(values, signs, lane);
  const float factor = norm > 0.0f ? 1.0f / (norm * sqrt(float(D))) : 0.0f;
  UNROLL for (int i = 0; i < kOwn; ++i) values[i] *= factor;
  return {norm, as_type<float>(exponent << 23)};
}

// Reports a slot outside the cache. Returns the slot, or -1 if the vector is not stored.
METAL_FUNC int checked_slot(
    int64_t wanted, device ErrorLog* errors, constant EncodeParameters& parameters, VectorPlace place, bool reports) {
  const bool is_outside = wanted >= parameters.capacity;
  if (is_outside && reports) {
    const int64_t entry = (parameters.slot_batch == 0 ? 0 : place.batch) * int64_t(parameters.vectors.tokens);
    report_error(
        errors, parameters.op, "slots: expected slots below the cache's size, got ", wanted, entry + place.token,
        __LINE__);
  }
  return wanted < 0 || is_outside ? -1 : int(wanted);
}

// Returns word `index` of the bit stream of the codes. The last code is followed by zeros, or by the first codes if the
// stream is a ring.
template <int D, int bits, bool kIsRing>
METAL_FUNC uint packed_word(threadgroup const uchar* codes, int index) {
  constexpr int kTouched = (32 + bits - 1) / bits + (32 % bits == 0 ? 0 : 1);
  const int first = index * 32 / bits;
  uint word = 0;
  UNROLL for (int i = 0; i < kTouched; ++i) {
    const int shift = (first + i) * bits - index * 32;
    const int d = first + i;
    const uint code = d < D ? uint(codes[d]) : kIsRing ? uint(codes[d - D]) : 0u;
    if (shift < 32) word |= shift >= 0 ? code << uint(shift) : code >> uint(-shift);
  }
  return word;
}
