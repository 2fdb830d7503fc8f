// Reads rows of pages and of packed queries in the form that row_attention.h requires.
#pragma once
#include "attention/sequences.h"
#include "core/row_attention.h"

// Rows of pages. They begin `offsets` elements into the cache.
template <typename C>
struct PagedRows {
  device const C* cache;
  threadgroup const int64_t* offsets;
  bool has_vectors;

  METAL_FUNC float4 four(int key, int column) const {
    device const C* source = cache + offsets[key] + column;
    if (has_vectors) return float4(*(device const vec<C, 4>*)source);
    return float4(float(source[0]), float(source[1]), float(source[2]), float(source[3]));
  }
  METAL_FUNC float2 two(int key, int column) const {
    device const C* source = cache + offsets[key] + column;
    if (has_vectors) return float2(*(device const vec<C, 2>*)source);
    return float2(float(source[0]), float(source[1]));
  }
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
    QueryParts<T> both;
    both.first = vec<T, 2>(first_values.x, second_values.x);
    both.second = vec<T, 2>(first_values.y, second_values.y);
    return both;
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
  QueryRows<T> rows;
  rows.first = q + first_token * parameters.q.token + (head + first % parameters.ratio) * parameters.q.head;
  rows.second = q + second_token * parameters.q.token + (head + second % parameters.ratio) * parameters.q.head;
  rows.has_first = own_row < tile.rows;
  rows.has_second = own_row + 1 < tile.rows;
  rows.row = fragment_row;
  return rows;
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
    QueryParts<T> both;
    both.first = held[kHeld > 0 ? part : 0];
    both.second = held[kHeld > 0 ? part + 1 : 0];
    return both;
  }
};

template <typename T, int D, int kSharing>
struct TileQuery<T, D, kSharing, true> {
  typedef float Element;
  StagedQuery query;

  // The caller's next barrier ends this copy.
  METAL_FUNC void load(QueryRows<T> source, threadgroup float2* shared, uint simdgroup, uint lane) {
    stage_rows<D, kSharing>(shared, source, simdgroup, lane);
    query.staged = shared;
    query.lane = lane;
  }
  METAL_FUNC QueryParts<float> parts(int part) const { return query.parts(part); }
};

METAL_FUNC SeenKeys seen_by_lane(constant PagedParameters& parameters, RowTile tile, int own_row) {
  const KeyRange first = seen_by(parameters, tile.sequence, tile.first_row + min(own_row, tile.rows - 1));
  const KeyRange second = seen_by(parameters, tile.sequence, tile.first_row + min(own_row + 1, tile.rows - 1));
  SeenKeys seen;
  seen.first = int2(first.first, second.first);
  seen.last = int2(first.last, second.last);
  return seen;
}
