// Writes the result of a tile of rows. If one threadgroup reads all keys, the result is divided by its sum and goes to
// `out`. If the keys of the sequence are split, it is not divided, and goes to the partials, f32:
// [N, HK, rows of a tile, splits, D] and [N, HK, rows of a tile, splits].
#pragma once
#include "attention/sequences.h"
#include "attention/softmax.h"

METAL_FUNC int64_t partial_row(constant PagedParameters& parameters, int sequence, int kv_head, int row) {
  return (int64_t(sequence) * parameters.kv_heads + kv_head) * parameters.rows + row;
}

// Returns the factor of o. It is 1 / l without a sink, and exp(m - M) / (l exp(m - M) + exp(sink - M)) with one, where
// M is the larger of m and the sink.
METAL_FUNC float normaliser(float m, float l, device const float* sinks, int has_sinks, int64_t head) {
  float sum = l;
  float factor = 1.0f;
  if (has_sinks != 0) {
    const float sink = sinks[head];
    const float largest = fmax(m, sink);
    factor = l == 0.0f ? 0.0f : exp(m - largest);
    sum = l * factor + exp(sink - largest);
  }
  return sum == 0.0f ? 0.0f : factor / sum;  // the result is 0 for a row that saw no key
}

// Writes a lane's two rows of a tile, from `first` on, for one split of the keys.
template <int D, typename T>
METAL_FUNC void store_rows(
    thread const float2* o,
    RowState state,
    device T* out,
    device float* o_partials,
    device float* m_partials,
    device float* l_partials,
    device const float* sinks,
    constant PagedParameters& parameters,
    RowTile tile,
    int kv_head,
    int first,
    int splits,
    int split,
    int column_row) {
  UNROLL for (int i = 0; i < 2; ++i) {
    const int row = tile.first_row + first + i;
    const float m = i == 0 ? state.m.x : state.m.y;
    const float l = i == 0 ? state.l.x : state.l.y;
    if (first + i < tile.rows && splits == 1) {
      const int64_t token = tile.sequence.first + row / parameters.ratio;
      const int64_t head = int64_t(kv_head) * parameters.ratio + row % parameters.ratio;
      const float factor = normaliser(m, l, sinks, parameters.has_sinks, head);
      store_row<D>(out + token * parameters.out.token + head * parameters.out.head, o, i, factor, column_row);
    } else if (first + i < tile.rows) {
      const int64_t target = partial_row(parameters, tile.sequence.index, kv_head, row) * parameters.splits + split;
      store_row<D>(o_partials + target * D, o, i, 1.0f, column_row);
      if (column_row == 0) {
        m_partials[target] = m;
        l_partials[target] = l;
      }
    }
  }
}
