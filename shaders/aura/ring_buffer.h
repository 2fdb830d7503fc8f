// Finds tokens of a paged cache that have exact rows, and stages these rows in a tile of keys or values. Codes are
// rotated, so the rows are rotated too; lanes_of(D) lanes of a simdgroup rotate one row.
// csrc/ops/aura/pages.h says which tokens are exact and where their rows are.
#pragma once
#include "attention/sequences.h"
#include "aura/pages.h"
#include "aura/rotation.h"
#include "core/tile.h"

// Says where a token of a tile is read from.
GDN_CONSTANT int kFromCodes = 0;
GDN_CONSTANT int kFromSlot = 1;
GDN_CONSTANT int kFromNew = 2;

// This is empty in a kernel without exact rows.
template <bool kExact, typename E, int D, int kKeys, int kThreads>
struct ExactTokens {};

template <typename E, int D, int kKeys, int kThreads>
struct ExactTokens<true, E, D, kKeys, kThreads> {
  device const E* keys;
  device const E* values;
  device const E* new_keys;
  device const E* new_values;
  device const int* slots;
  device const int* starts;
  device const int* sink_slots;
  device const float* key_signs;
  device const float* value_signs;
  device ErrorLog* errors;
  constant OpName* op;
  constant ExactRowsParameters* parameters;
  threadgroup int* sources;  // one source for each key of the tile
  uint simdgroup;

  // The thread of a key of the tile calls this. Returns false if the token has only codes.
  METAL_FUNC bool locate(
      PagedSequence sequence, int position, int kv_head, int key, threadgroup int64_t* offsets) const {
    const int first_query = sequence.keys - sequence.queries;
    sources[key] = kFromCodes;
    if (position >= first_query) {
      const int64_t token = sequence.first + (position - first_query);
      offsets[key] = token * parameters->new_key.token + kv_head * parameters->new_key.head;
      offsets[kKeys + key] = token * parameters->new_value.token + kv_head * parameters->new_value.head;
      sources[key] = kFromNew;
      return true;
    }
    const bool is_sink = position < parameters->sinks;
    if (!is_sink && position < first_query - parameters->tail) return false;
    if (!is_sink && position < read_index(starts, sequence.index * parameters->start, parameters->start_bytes)) {
      return false;
    }
    const int64_t slot =
        is_sink ? read_index(sink_slots, sequence.index * parameters->sink_slot, parameters->sink_slot_bytes)
                : read_index(slots, sequence.index * parameters->slot, parameters->slot_bytes);
    if (slot < 0 || slot >= parameters->slots) return false;
    const KeyPlace place{slot, is_sink ? position : parameters->sinks + position % parameters->ring};
    offsets[key] = offset_of(parameters->key, place, kv_head);
    offsets[kKeys + key] = offset_of(parameters->value, place, kv_head);
    sources[key] = kFromSlot;
    return true;
  }

  // One thread per sequence with queries calls this.
  METAL_FUNC void report(int sequence) const {
    const int64_t slot = read_index(slots, sequence * parameters->slot, parameters->slot_bytes);
    if (slot >= parameters->slots) {
      report_error(errors, *op, "exact_slots: expected slots of exact_keys, got ", slot, sequence, __LINE__);
    }
    const int64_t sink_slot = read_index(sink_slots, sequence * parameters->sink_slot, parameters->sink_slot_bytes);
    if (sink_slot >= parameters->slots) {
      report_error(errors, *op, "exact_sink_slots: expected slots of exact_keys, got ", sink_slot, sequence, __LINE__);
    }
  }

  METAL_FUNC void stage_keys(threadgroup float* tile, threadgroup const int64_t* offsets, uint thread_index) const {
    stage(tile, keys, new_keys, offsets, key_signs, thread_index);
  }
  METAL_FUNC void stage_values(threadgroup float* tile, threadgroup const int64_t* offsets, uint thread_index) const {
    stage(tile, values, new_values, offsets + kKeys, value_signs, thread_index);
  }

  // Every thread must call this, because the lanes of a row exchange its elements.
  METAL_FUNC void stage(
      threadgroup float* tile,
      device const E* slot_rows,
      device const E* new_rows,
      threadgroup const int64_t* offsets,
      device const float* signs,
      uint thread_index) const {
    constexpr int kRows = 32 / lanes_of(D);  // rows per simdgroup
    constexpr int kOwn = D / lanes_of(D);
    static_assert(kKeys % kRows == 0, "the lanes of a simdgroup have rows of one tile");
    const uint lane = thread_index % 32;
    const float factor = 1.0f / sqrt(float(D));
    for (int first = int(simdgroup) * kRows; first < kKeys; first += kThreads / 32 * kRows) {
      const int key = first + int(lane) / lanes_of(D);
      const int source = sources[key];
      if (!simd_any(source != kFromCodes)) continue;
      device const E* row = (source == kFromNew ? new_rows : slot_rows) + (source == kFromCodes ? 0 : offsets[key]);
      float own[kOwn];
      UNROLL for (int i = 0; i < kOwn; ++i) { own[i] = source == kFromCodes ? 0.0f : float(row[place_of<D>(i, lane)]); }
      rotate<D, false>(own, signs, lane);
      UNROLL for (int i = 0; i < kOwn; ++i) {
        if (source != kFromCodes) tile[key * tile_stride<float>(D) + place_of<D>(i, lane)] = own[i] * factor;
      }
    }
  }
};
