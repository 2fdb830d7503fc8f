// Moves rows of tokens [B, T, HV, columns] into a plane of the gradients' matrices, or back, for the ops of single
// stages. A threadgroup is one simdgroup, and owns one chunk of one value head. Layout: rows with row strides, and a
// plane as in chunk_bwd.h, with zeros past the tokens and columns.
#include "core/sequences.h"
#include "gdn/chunk_bwd.h"

template <bool ToRows>
[[kernel]] void chunk_bwd_rows(
    device float* rows [[buffer(0)]],
    device float* matrices [[buffer(1)]],
    device const int* cu_seqlens [[buffer(2)]],
    device ErrorLog* errors [[buffer(3)]],
    constant ChunkBwdMoveParameters& parameters [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_threadgroup]]) {
  const Chunk chunk = locate_own_chunk(cu_seqlens, parameters.sequence, group, kBwdChunk, errors, 0, lane);
  const int64_t row = int64_t(group.z) * parameters.sequence.chunks + group.x, head = group.y;
  device float* matrix = matrices + (row * parameters.value_heads + head) * parameters.matrix_stride;
  device float* first = rows + offset_of(parameters.rows, chunk.batch, int64_t(chunk.first), head);
  for (int i = 0; i < kBwdChunk; ++i) {
    for (int column = int(lane); column < parameters.padded_columns; column += 32) {
      const int64_t place = i * parameters.row_stride + column, source = i * parameters.rows.token + column;
      const bool is_there = i < chunk.tokens && column < parameters.columns;
      if (!ToRows) matrix[place] = is_there ? first[source] : 0.0f;
      if (ToRows && is_there) first[source] = matrix[place];
    }
  }
}
