// Stages 8 query rows in threadgroup memory for products of fragments (core/row_attention.h).
#pragma once
#include "aura/visibility.h"
#include "core/row_attention.h"

// Stages q for StagedQuery if a lane loads kWidth neighbouring columns of a key.
template <typename T, int D, int kWidth, typename Parameters>
METAL_FUNC void stage_queries(
    threadgroup float2* staged,
    device const T* q,
    constant Parameters& parameters,
    int batch,
    int kv_head,
    int first_row,
    uint thread_index) {
  for (int item = int(thread_index); item < D * 4; item += kAuraThreads) {
    const LanePosition at = lane_position(uint(item % 32));
    const int part = item / 32;
    const int column = column_of_query<D, kWidth>(part, at.row);
    float2 both;
    UNROLL for (int i = 0; i < 2; ++i) {
      const int row = min(first_row + at.column + i, parameters.rows - 1);
      const RowPlace place = row_place(parameters, batch, kv_head, row);
      both[i] = float(q[offset_of(parameters.q, batch, place.head, place.query) + column]);
    }
    staged[item] = both;
  }
}
