// Reads rows of pages and of packed queries in the form that row_attention.h requires, and writes the result of a tile
// of rows. If one threadgroup reads all keys, the result is divided by its sum and goes to `out`. If the keys of the
// sequence are split, it is not divided, and goes to the partials, f32: [N, HK, rows of a tile, splits, D] and
// [N, HK, rows of a tile, splits].
#pragma once
#include "attention/sequences.h"
#include "core/row_attention.h"

// Rows of pages. They begin `offsets` elements into the cache.
template <typename C>
struct PagedRows {
  device const C* cache;
  threadgroup const int64_t* offsets;
  bool has_vectors;

  METAL_FUNC float4 four(int key, int column) const { return load_four(cache + offsets[key] + column, has_vectors); }
  METAL_FUNC float2 two(int key, int column) const { return load_two(cache + offsets[key] + column, has_vectors); }
};

// A lane's two query rows. A row that does not exist is zeros.
template <typename T>
struct QueryRows {
  device const T* first;
  device const T* second;
  bool has_first, has_second;
  int row;  // row of a fragment

  // In keys, a lane has four adjacent columns of 16. In queries, it has two of these, one in each fragment.
  METAL_FUNC QueryParts<T> parts(int part) const {
    const int64_t column = int64_t(part) * 8 + int64_t(row) * 2;
    vec<T, 2> first_values = vec<T, 2>(T(0), T(0));
    vec<T, 2> second_values = vec<T, 2>(T(0), T(0));
    if (has_first) first_values = *(device const vec<T, 2>*)(first + column);
    if (has_second) second_values = *(device const vec<T, 2>*)(second + column);
    return {vec<T, 2>(first_values.x, second_values.x), vec<T, 2>(first_values.y, second_values.y)};
  }
};

template <typename T>
METAL_FUNC QueryRows<T> query_rows(
    device const T* q, constant PagedParameters& parameters, RowTile tile, int kv_head, int own_row, int fragment_row) {
  const int first = tile.first_row + clamp(own_row, 0, max(tile.rows - 1, 0));
  const int second = tile.first_row + clamp(own_row + 1, 0, max(tile.rows - 1, 0));
  const int64_t head = int64_t(kv_head) * parameters.ratio;
  const int64_t first_token = tile.sequence.first + first / parameters.ratio;
  const int64_t second_token = tile.sequence.first + second / parameters.ratio;
  return {
      q + first_token * parameters.q.token + (head + first % parameters.ratio) * parameters.q.head,
      q + second_token * parameters.q.token + (head + second % parameters.ratio) * parameters.q.head,
      own_row < tile.rows, own_row + 1 < tile.rows, fragment_row};
}

// Stages queries for StagedQuery.
template <int D, int kSimdgroups, typename T>
METAL_FUNC void stage_rows(threadgroup float2* staged, QueryRows<T> rows, uint simdgroup, uint lane) {
  for (int part = int(simdgroup) * 2; part < D / 8; part += kSimdgroups * 2) {
    const QueryParts<T> both = rows.parts(part);
    staged[part * 32 + int(lane)] = float2(both.first);
    staged[part * 32 + 32 + int(lane)] = float2(both.second);
  }
}

// Holds the queries of a simdgroup. They stay in registers, in their own dtype, if a row takes at most 256 bytes, which
// is 64 bytes per lane. Larger rows would spill, since registers also hold o and the keys, so they are read again for
// each tile of keys. If more than one simdgroup (kSharing) shares the queries, they are in threadgroup memory.
template <typename T, int D, int kSharing, bool kIsShared>
struct TileQuery {
  typedef T Element;
  enum { kHeld = D * int(sizeof(T)) <= 256 ? D / 8 : 0 };
  QueryRows<T> rows;
  vec<T, 2> held[kHeld + 1];

  METAL_FUNC void load(QueryRows<T> source, threadgroup float2*, uint, uint) {
    rows = source;
    UNROLL for (int part = 0; part < kHeld; part += 2) {
      const QueryParts<T> both = rows.parts(part);
      held[part] = both.first;
      held[part + 1] = both.second;
    }
  }
  METAL_FUNC QueryParts<T> parts(int part) const {
    if (kHeld == 0) return rows.parts(part);
    return {held[kHeld > 0 ? part : 0], held[kHeld > 0 ? part + 1 : 0]};
  }
};

template <typename T, int D, int kSharing>
struct TileQuery<T, D, kSharing, true> {
  typedef float Element;
  StagedQuery query;

  // The caller's next barrier ends this copy.
  METAL_FUNC void load(QueryRows<T> source, threadgroup float2* shared, uint simdgroup, uint lane) {
    stage_rows<D, kSharing>(shared, source, simdgroup, lane);
    query = {shared, lane};
  }
  METAL_FUNC QueryParts<float> parts(int part) const { return query.parts(part); }
};

METAL_FUNC SeenKeys seen_by_lane(constant PagedParameters& parameters, RowTile tile, int own_row) {
  const KeyRange first = seen_by(parameters, tile.sequence, tile.first_row + min(own_row, tile.rows - 1));
  const KeyRange second = seen_by(parameters, tile.sequence, tile.first_row + min(own_row + 1, tile.rows - 1));
  return {int2(first.first, second.first), int2(first.last, second.last)};
}

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

// Where results go, and the sinks' logits.
template <typename T>
struct Output {
  device T* out;
  Partials partials;
  device const float* sinks;
};

// Writes a lane's two rows of a tile, from `first` on, for one split of the keys.
template <int D, typename T>
METAL_FUNC void store_rows(
    thread const float2* o,
    RowState state,
    Output<T> output,
    constant PagedParameters& parameters,
    RowTile tile,
    int kv_head,
    int first,
    int splits,
    int split,
    int column_row) {
  UNROLL for (int i = 0; i < 2; ++i) {
    const int row = tile.first_row + first + i;
    const float m = state.m[i], l = state.l[i];
    if (first + i < tile.rows && splits == 1) {
      const int64_t token = tile.sequence.first + row / parameters.ratio;
      const int64_t head = int64_t(kv_head) * parameters.ratio + row % parameters.ratio;
      const float factor = normaliser(m, l, output.sinks, parameters.has_sinks, head);
      store_row<D>(output.out + token * parameters.out.token + head * parameters.out.head, o, i, factor, column_row);
    } else if (first + i < tile.rows) {
      const int64_t target = partial_row(parameters, tile.sequence.index, kv_head, row) * parameters.splits + split;
      store_row<D>(output.partials.o + target * D, o, i, 1.0f, column_row);
      if (column_row == 0) {
        output.partials.m[target] = m;
        output.partials.l[target] = l;
      }
    }
  }
}
