// Finds sequences and chunks in cu_seqlens on the device. Boundaries are clamped to [0, T] and made ascending. Wrong
// boundaries therefore never lead out of a tensor, and never give a token to two threadgroups. report_cu_seqlens()
// tells the user.
#pragma once
#include "core/error.h"
#include "core/fragment.h"
#include "core/indices.h"
#include "core/parameters.h"
#include "core/rows.h"

struct Chunk {
  int batch;    // batch row; 0 for packed sequences
  int first;    // first token
  int tokens;   // 0 for a surplus chunk
  int64_t row;  // row of h
  int sequence;
  int offset;  // the sequence's tokens before the chunk
};

struct Sequence {
  int batch;
  int first, last;      // tokens [first, last)
  int64_t first_chunk;  // row of h
};

METAL_FUNC int64_t read_boundary(device const int* cu_seqlens, constant SequenceParameters& sequence, int index) {
  return read_index(cu_seqlens, index * sequence.boundary_stride, sequence.boundary_bytes);
}

METAL_FUNC int clamped_boundary(device const int* cu_seqlens, constant SequenceParameters& sequence, int index) {
  const int64_t boundary = read_boundary(cu_seqlens, sequence, index);
  const int tokens = sequence.tokens;
  return boundary < 0 ? 0 : boundary > tokens ? tokens : int(boundary);
}

METAL_FUNC int key_head_of(int value_head, HeadGroups heads) { return value_head / heads.divisor % heads.modulus; }

METAL_FUNC int chunk_count(int tokens, int chunk_size) { return (tokens + chunk_size - 1) / chunk_size; }

// A window of 32 sequences. Lane i holds sequence base + i.
struct SequenceWindow {
  int first, last;
  int chunks_before, chunks;
};

METAL_FUNC SequenceWindow sequence_window(
    device const int* cu_seqlens,
    constant SequenceParameters& sequence,
    int base,
    int carried_boundary,
    int carried_chunks,
    int chunk_size,
    uint lane) {
  const int index = base + int(lane);
  const int own = index < sequence.sequences ? clamped_boundary(cu_seqlens, sequence, index + 1) : 0;
  const int last = largest_so_far(max(own, carried_boundary), lane);
  const int previous = simd_shuffle_up(last, ushort(1));
  const int first = lane == 0 ? carried_boundary : previous;
  const int chunks = chunk_count(last - first, chunk_size);
  return {first, last, carried_chunks + simd_prefix_exclusive_sum(chunks), chunks};
}

// Finds chunk `target` of a batch row, or of all packed sequences. Every lane of the simdgroup must call this.
METAL_FUNC Chunk locate_chunk(
    device const int* cu_seqlens,
    constant SequenceParameters& sequence,
    int target,
    int batch,
    int chunk_size,
    uint lane) {
  Chunk chunk;
  chunk.batch = batch;
  chunk.row = int64_t(batch) * sequence.chunks + target;
  chunk.first = int(min(int64_t(target) * chunk_size, int64_t(sequence.tokens)));  // a surplus chunk has no tokens
  chunk.tokens = min(chunk_size, sequence.tokens - chunk.first);
  chunk.sequence = batch;
  chunk.offset = chunk.first;
  if (sequence.boundary_bytes == 0) return chunk;

  chunk.tokens = 0;
  int carried_boundary = clamped_boundary(cu_seqlens, sequence, 0);
  int carried_chunks = 0;
  for (int base = 0; base < sequence.sequences; base += 32) {
    const SequenceWindow window =
        sequence_window(cu_seqlens, sequence, base, carried_boundary, carried_chunks, chunk_size, lane);
    const bool here = target >= window.chunks_before && target < window.chunks_before + window.chunks;
    const ushort owner = ushort(simd_min(here ? lane : 32u));
    if (owner < 32) {
      chunk.sequence = base + int(owner);
      chunk.offset =
          int(min(int64_t(target - simd_shuffle(window.chunks_before, owner)) * chunk_size, int64_t(sequence.tokens)));
      chunk.first = simd_shuffle(window.first, owner) + chunk.offset;
      chunk.tokens = min(chunk_size, simd_shuffle(window.last, owner) - chunk.first);
      return chunk;
    }
    carried_boundary = simd_shuffle(window.last, ushort(31));
    carried_chunks = simd_shuffle(window.chunks_before + window.chunks, ushort(31));
  }
  return chunk;
}

// Every lane of the simdgroup must call this.
METAL_FUNC Sequence locate_sequence(
    device const int* cu_seqlens, constant SequenceParameters& sequence, int target, int chunk_size, uint lane) {
  if (sequence.boundary_bytes == 0) return {target, 0, sequence.tokens, int64_t(target) * sequence.chunks};

  int carried_boundary = clamped_boundary(cu_seqlens, sequence, 0);
  int carried_chunks = 0;
  const int base_of_target = target / 32 * 32;
  for (int base = 0; base < base_of_target; base += 32) {
    const SequenceWindow window =
        sequence_window(cu_seqlens, sequence, base, carried_boundary, carried_chunks, chunk_size, lane);
    carried_boundary = simd_shuffle(window.last, ushort(31));
    carried_chunks = simd_shuffle(window.chunks_before + window.chunks, ushort(31));
  }
  const SequenceWindow window =
      sequence_window(cu_seqlens, sequence, base_of_target, carried_boundary, carried_chunks, chunk_size, lane);
  const ushort owner = ushort(target - base_of_target);
  return {
      0, simd_shuffle(window.first, owner), simd_shuffle(window.last, owner),
      simd_shuffle(window.chunks_before, owner)};
}

// Reports wrong cu_seqlens. Also reports chunks beyond NT, unless chunk_size is 0. One simdgroup of the grid calls
// this.
METAL_FUNC void report_cu_seqlens(
    device const int* cu_seqlens,
    constant SequenceParameters& sequence,
    int chunk_size,
    device ErrorLog* errors,
    uint lane) {
  if (sequence.boundary_bytes == 0) return;
  const int none = sequence.sequences + 1;
  int wrong = none;  // the first index of a wrong boundary
  int chunks = 0;
  for (int index = int(lane); index <= sequence.sequences; index += 32) {
    const int64_t boundary = read_boundary(cu_seqlens, sequence, index);
    const int64_t lowest = index == 0 ? 0 : max(read_boundary(cu_seqlens, sequence, index - 1), int64_t(0));
    const int64_t highest = index == 0 ? 0 : int64_t(sequence.tokens);
    const bool is_outside = boundary < lowest || boundary > highest;
    const bool ends_wrong = index == sequence.sequences && boundary != sequence.tokens;
    if (is_outside || ends_wrong) wrong = min(wrong, index);
    if (wrong == none && chunk_size > 0 && index > 0) chunks += chunk_count(int(boundary - lowest), chunk_size);
  }
  wrong = simd_min(wrong);
  chunks = simd_sum(chunks);
  if (lane != 0) return;
  if (wrong != none) {
    report_error(
        errors, sequence.op, "cu_seqlens: expected boundaries that start at 0, ascend and end at T, got ",
        read_boundary(cu_seqlens, sequence, wrong), wrong, __LINE__);
  } else if (chunks > sequence.chunks) {
    report_error(
        errors, sequence.op, "chunk_indices: expected one row for each chunk of cu_seqlens, got fewer than ", chunks,
        -1, __LINE__);
  }
}

// Finds the chunk of a threadgroup: x is the chunk, z the batch row. The grid's first simdgroup reports wrong
// cu_seqlens. Every lane must call this.
METAL_FUNC Chunk locate_own_chunk(
    device const int* cu_seqlens,
    constant SequenceParameters& sequence,
    uint3 group,
    int chunk_size,
    device ErrorLog* errors,
    uint simdgroup,
    uint lane) {
  if (group.x == 0 && group.y == 0 && group.z == 0 && simdgroup == 0) {
    report_cu_seqlens(cu_seqlens, sequence, chunk_size, errors, lane);
  }
  return locate_chunk(cu_seqlens, sequence, int(group.x), int(group.z), chunk_size, lane);
}
