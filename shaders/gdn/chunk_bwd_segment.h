// Finds a threadgroup's matrices, and the chunks of a sequence that lie in the segment.
#pragma once
#include "core/gates.h"
#include "core/sequences.h"
#include "gdn/chunk_bwd.h"

// Returns the index of a chunk's matrices. `row` counts from the segment's first chunk.
METAL_FUNC int64_t matrices_of(constant ChunkBwdParameters& parameters, int64_t batch, int64_t row, int64_t head) {
  return (batch * parameters.capacity + row) * parameters.value_heads + head;
}

METAL_FUNC int64_t key_plane(constant ChunkBwdParameters& parameters, int64_t matrices, int plane) {
  return (matrices * kBwdKeyPlanes + plane) * kBwdChunk * parameters.key_columns;
}

METAL_FUNC int64_t value_plane(constant ChunkBwdParameters& parameters, int64_t matrices, int plane) {
  return (matrices * kBwdValuePlanes + plane) * kBwdChunk * parameters.value_columns;
}

METAL_FUNC int64_t square_plane(int64_t matrices, int plane) {
  return (matrices * kBwdSquarePlanes + plane) * kBwdChunk * kBwdChunk;
}

METAL_FUNC int64_t channel_plane(constant ChunkBwdParameters& parameters, int64_t matrices, int plane) {
  return (matrices * kBwdChannelPlanes + plane) * parameters.key_columns;
}

// The states of a segment are [K, V] in whole blocks of rows and whole slices of columns. A simdgroup moves the 256
// bytes of an 8x8 block as its lanes hold them (core/fragment.h). Blocks of the same columns follow one another.
METAL_FUNC int64_t state_floats(constant ChunkBwdParameters& parameters) {
  return int64_t(parameters.key_rows) * parameters.value_columns;
}

METAL_FUNC int64_t state_block(constant ChunkBwdParameters& parameters, int row, int column) {
  return int64_t(column) * parameters.key_rows + int64_t(row) * 8;
}

// Returns the log decay of a chunk's token i. If `Summed`, `gates` has the sum of the log decays up to each token.
template <bool Summed>
METAL_FUNC float log_decay_of(device const float* gates, int64_t token_stride, int i) {
  const float gate = gates[i * token_stride];
  return clamped_log_decay(Summed && i > 0 ? gate - gates[(i - 1) * token_stride] : gate);
}

// Every lane of the simdgroup must call this.
METAL_FUNC Chunk
own_chunk(device const int* cu_seqlens, constant ChunkBwdParameters& parameters, uint row, uint batch, uint lane) {
  return locate_chunk(cu_seqlens, parameters.sequence, parameters.first_row + int(row), int(batch), kBwdChunk, lane);
}

// The rows [from, to) of the segment that are chunks of a sequence. It may go on before and after them.
struct SequenceRows {
  int64_t batch;
  int64_t from, to;
  bool is_here;  // a sequence without tokens has no rows, but one segment that it is in
  bool starts_here, ends_here;
};

METAL_FUNC SequenceRows
own_rows(device const int* cu_seqlens, constant ChunkBwdParameters& parameters, uint target, uint lane) {
  const Sequence sequence = locate_sequence(cu_seqlens, parameters.sequence, int(target), kBwdChunk, lane);
  const bool is_packed = parameters.sequence.boundary_bytes != 0;
  const int64_t first = (is_packed ? sequence.first_chunk : 0) - parameters.first_row;
  const int64_t last = first + chunk_count(sequence.last - sequence.first, kBwdChunk);
  const int64_t from = max(first, int64_t(0));
  const int64_t to = min(last, int64_t(parameters.rows));
  const bool is_empty_here = first == last && first >= 0 && (first < parameters.rows || parameters.is_last != 0);
  const bool ends_here = last <= parameters.rows || parameters.is_last != 0;
  return {sequence.batch, from, to, from < to || is_empty_here, first >= 0, ends_here};
}
