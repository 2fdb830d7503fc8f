// What the kernels of the delta rules' gradients share with their host. They take a segment of chunks at a time, whose
// matrices the host allocates once: f32, for each batch row, chunk of the segment and value head.
#pragma once
#include "core/parameters.h"

GDN_CONSTANT int kBwdChunk = 16;  // tokens
GDN_CONSTANT int kBwdSlice = 32;  // columns that a threadgroup takes at a time

enum { kBwdThreads = 128 };  // of the kernels that multiply tiles

inline constexpr int whole_slices(int columns) { return (columns + kBwdSlice - 1) / kBwdSlice * kBwdSlice; }
inline constexpr int whole_blocks(int rows) { return (rows + 7) / 8 * 8; }

// The planes of `keys` [5, C, K], `values` [3, C, V], `squares` [5, C, C] and `channels` [2, K], where K and V are
// whole slices. The gradients of a plane of keys replace it, and then those of q and k replace two of them; dq is that
// of the scaled q. The first plane of channels has the log of `last`, the second the gradient of `last` times `last`.
enum BwdKeys { kBwdQ, kBwdK, kBwdQRead, kBwdKRead, kBwdKWrite, kBwdKeyPlanes };
enum BwdKeyGradients { kBwdDqRead = kBwdQRead, kBwdDkRead = kBwdKRead, kBwdDkWrite = kBwdKWrite };
enum BwdKeyResults { kBwdDq = kBwdQRead, kBwdDk = kBwdKRead };
enum BwdValues { kBwdR, kBwdDo, kBwdDu, kBwdValuePlanes };
enum BwdSquares { kBwdL, kBwdP, kBwdInverse, kBwdDL, kBwdDP, kBwdSquarePlanes };
enum BwdChannels { kBwdLast, kBwdDlast, kBwdChannelPlanes };

struct ChunkBwdParameters {
  SequenceParameters sequence;
  RowStrides q, k, v, d_o, g, beta;
  StateStrides initial_state, final_gradient, initial_gradient;
  HeadGroups heads;
  int32_t value_heads, key_heads, key_size, value_size;
  int32_t key_columns, value_columns, key_rows;  // the sizes as whole slices, and K as whole blocks
  int32_t first_row, rows, capacity;  // the segment's chunks of a batch row, and how many the matrices have room for
  int32_t is_last;                    // the last segment
  int32_t has_initial_state, has_final_gradient, has_initial_gradient;
  int32_t has_carried;  // if 1, a state that goes on into the next segment is stored
  int32_t is_normalised;
  float scale;
};

GDN_CONSTANT int kBwdKeysRows = 4;  // tokens per threadgroup, one per simdgroup

struct ChunkBwdMoveParameters {
  SequenceParameters sequence;
  RowStrides rows;                         // of tokens
  int64_t matrix_stride, row_stride;       // of the matrices
  int32_t value_heads, key_size, columns;  // the columns of rows or of states
  int32_t key_rows, padded_columns;        // of the matrices
};
