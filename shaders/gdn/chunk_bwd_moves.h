#pragma once
#include "gdn/chunk_bwd.h"

struct ChunkBwdMoveParameters {
  SequenceParameters sequence;
  RowStrides rows;                         // of tokens
  int64_t matrix_stride, row_stride;       // of the matrices
  int32_t value_heads, key_size, columns;  // the columns of rows or of states
  int32_t key_rows, padded_columns;        // of the matrices
};
