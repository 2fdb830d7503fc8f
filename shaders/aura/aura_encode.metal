// A simdgroup owns 32 / lanes_of(D) vectors; a lane holds D / lanes_of(D) elements in registers, in f32. Threadgroup
// memory holds boundaries, centroids and a byte for each code, of which lanes pack whole words. Layout: x [B, H, T, D],
// codes [B, H, S, words], norms (f16) and means [B, H, S], all with strides; slots [B, T] of 32 or 64 bits.
#include "aura/aura_encode.h"
#include "aura/codes.h"
#include "aura/rotation.h"
#include "core/error.h"
#include "core/indices.h"

// The slot of a vector; -1: not to be stored, -2: past the cache. A 64-bit slot is two words, the low one first.
METAL_FUNC int64_t slot_of(device const int* slots, constant EncodeParameters& parameters, VectorPlace place) {
  if (!place.present) return -1;
  if (parameters.slot_bytes == 0) return place.token;
  const int64_t entry = place.batch * parameters.slot_batch + place.token * parameters.slot_token;
  return read_index(slots, entry, parameters.slot_bytes);
}

// The exponent's bits of the largest element: divided by that power of two, squares neither overflow nor vanish.
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

// The number of boundaries below y, found bit by bit; a NaN is above none.
template <int bits>
METAL_FUNC uint quantise(float y, threadgroup const float* boundaries) {
  uint code = 0;
  UNROLL for (uint step = 1u << (bits - 1); step > 0; step /= 2) code += y > boundaries[code + step - 1] ? step : 0u;
  return code;
}

// Word `index` of the codes' bit stream.
template <int D, int bits>
METAL_FUNC uint packed_word(threadgroup const uchar* codes, int index) {
  constexpr int kTouched = (32 + bits - 1) / bits + (32 % bits == 0 ? 0 : 1);
  const int first = index * 32 / bits;
  uint word = 0;
  UNROLL for (int i = 0; i < kTouched; ++i) {
    const int shift = (first + i) * bits - index * 32;
    const uint code = first + i < D ? uint(codes[first + i]) : 0u;
    if (shift < 32) word |= shift >= 0 ? code << uint(shift) : code >> uint(-shift);
  }
  return word;
}

template <typename T, int bits, int D>
[[kernel]] void aura_encode(
    device const T* x [[buffer(0)]],
    device const int* slots [[buffer(1)]],
    device const float* signs [[buffer(2)]],
    device const float* boundaries [[buffer(3)]],
    device const float* codebook [[buffer(4)]],
    device uint* codes [[buffer(5)]],
    device half* norms [[buffer(6)]],
    device float* means [[buffer(7)]],
    device ErrorLog* errors [[buffer(8)]],
    constant EncodeParameters& parameters [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(bits == 2 || bits == 3 || bits == 4 || bits == 8, "a code has 2, 3, 4 or 8 bits");
  constexpr int kLevels = 1 << bits;
  constexpr int kOwn = D / lanes_of(D);
  constexpr int kOfSimdgroup = 32 / lanes_of(D);  // vectors
  constexpr int kVectors = kAuraThreads / lanes_of(D);
  constexpr int kWords = words_of(D, bits);
  threadgroup float table[2 * kLevels];
  threadgroup uchar code_bytes[kVectors * D];
  threadgroup int slot_of_vector[kVectors];
  threadgroup const float* centroids = table + kLevels;
  stage_table(table, boundaries, kLevels - 1, thread_index, kAuraThreads);
  stage_table(table + kLevels, codebook, kLevels, thread_index, kAuraThreads);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const VectorPlace place = vector_place<D>(parameters.vectors, group.x, simdgroup, lane);
  device const T* source = x + offset_of(parameters.x, place.batch, place.head, place.token);
  float values[kOwn];
  UNROLL for (int i = 0; i < kOwn; ++i) values[i] = float(source[place_of<D>(i, lane)]);
  float mean = 0.0f;
  if (parameters.has_means != 0) {
    UNROLL for (int i = 0; i < kOwn; ++i) mean += values[i];
    mean = sum_over_lanes<D>(mean) / float(D);
    UNROLL for (int i = 0; i < kOwn; ++i) values[i] -= mean;
  }

  const uint exponent = exponent_of_largest<D>(values);
  const float shrink = as_type<float>((254u - exponent) << 23);
  UNROLL for (int i = 0; i < kOwn; ++i) values[i] *= shrink;
  const float norm = sqrt(sum_of_squares<D>(values));
  rotate<D, false>(values, signs, lane);
  const float factor = norm > 0.0f ? 1.0f / (norm * sqrt(float(D))) : 0.0f;

  const int vector = int(simdgroup) * kOfSimdgroup + int(lane) / lanes_of(D);
  float kept[kOwn];
  UNROLL for (int i = 0; i < kOwn; ++i) {
    const uint code = quantise<bits>(values[i] * factor, table);
    code_bytes[vector * D + place_of<D>(i, lane)] = uchar(code);
    kept[i] = centroids[code];
  }
  const float kept_norm = sqrt(sum_of_squares<D>(kept));

  const int64_t wanted = slot_of(slots, parameters, place);
  const bool is_outside = wanted >= parameters.capacity;
  const int slot = wanted < 0 || is_outside ? -1 : int(wanted);
  if (int(lane) % lanes_of(D) == 0) {
    slot_of_vector[vector] = slot;
    if (slot >= 0) {
      const float grow = as_type<float>(exponent << 23);
      norms[offset_of(parameters.norms, place.batch, place.head, slot)] = half(norm / kept_norm * grow);
      if (parameters.has_means != 0) means[offset_of(parameters.means, place.batch, place.head, slot)] = mean;
    }
    if (is_outside) {
      const int64_t entry = (parameters.slot_batch == 0 ? 0 : place.batch) * int64_t(parameters.vectors.tokens);
      report_error(
          errors, parameters.op, "slots: expected slots below the cache's size, got ", wanted, entry + place.token,
          __LINE__);
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);

  for (int i = int(lane); i < kOfSimdgroup * kWords; i += 32) {
    const int other = int(simdgroup) * kOfSimdgroup + i / kWords;
    const VectorPlace at = vector_place<D>(parameters.vectors, group.x, simdgroup, uint(i / kWords * lanes_of(D)));
    if (slot_of_vector[other] >= 0) {
      device uint* target = codes + offset_of(parameters.codes, at.batch, at.head, slot_of_vector[other]);
      target[i % kWords] = packed_word<D, bits>(code_bytes + other * D, i % kWords);
    }
  }
}
