// A simdgroup owns 32 / lanes_of(D) vectors. A lane holds D / lanes_of(D) elements in registers, in f32. Threadgroup
// memory holds boundaries, centroids and one byte per code; lanes pack these bytes into words.
// Layout: x [B, H, T, D], codes [B, H, S, words], norms [B, H, S] f16, means of tiles [B, H, tiles, D] f16, all with
// strides; slots [B, T] of 32 or 64 bits.
//     direction = Pi (x - mean) / |x - mean|
//     code_d    = number of boundaries below direction_d
//     norm      = |x - mean| / |centroids of the codes|
#include "aura/encode.h"

// Returns the number of boundaries below y, which it finds bit by bit. For NaN it returns 0.
template <int bits>
METAL_FUNC uint quantise(float y, threadgroup const float* boundaries) {
  uint code = 0;
  UNROLL for (uint step = 1u << (bits - 1); step > 0; step /= 2) code += y > boundaries[code + step - 1] ? step : 0u;
  return code;
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
    device const half* tile_means [[buffer(7)]],
    device ErrorLog* errors [[buffer(8)]],
    constant EncodeParameters& parameters [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  static_assert(bits >= 2 && bits <= 8, "a code has at least 2 bits and fits a byte");
  constexpr int kLevels = 1 << bits;
  constexpr int kOwn = D / lanes_of(D);
  constexpr int kOfSimdgroup = 32 / lanes_of(D);  // vectors per simdgroup
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
  float values[kOwn];
  const int64_t wanted = slot_of(slots, parameters, place);
  read_vector<D>(values, x, tile_means, parameters, place, wanted, lane);
  const Length length = find_direction<D>(values, signs, lane);

  const int vector = int(simdgroup) * kOfSimdgroup + int(lane) / lanes_of(D);
  float kept[kOwn];
  UNROLL for (int i = 0; i < kOwn; ++i) {
    const uint code = quantise<bits>(values[i], table);
    code_bytes[vector * D + place_of<D>(i, lane)] = uchar(code);
    kept[i] = centroids[code];
  }
  const float kept_norm = sqrt(sum_of_squares<D>(kept));

  const bool is_first = int(lane) % lanes_of(D) == 0;
  const int slot = checked_slot(wanted, errors, parameters, place, is_first);
  if (is_first) {
    slot_of_vector[vector] = slot;
    if (slot >= 0) {
      norms[offset_of(parameters.norms, place.batch, place.head, slot)] = half(length.norm / kept_norm * length.grow);
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);

  for (int i = int(lane); i < kOfSimdgroup * kWords; i += 32) {
    const int other = int(simdgroup) * kOfSimdgroup + i / kWords;
    const VectorPlace at = vector_place<D>(parameters.vectors, group.x, simdgroup, uint(i / kWords * lanes_of(D)));
    if (slot_of_vector[other] >= 0) {
      device uint* target = codes + offset_of(parameters.codes, at.batch, at.head, slot_of_vector[other]);
      target[i % kWords] = packed_word<D, bits, false>(code_bytes + other * D, i % kWords);
    }
  }
}
