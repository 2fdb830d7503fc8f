// Pass 1 for the exact rows of a cache. One threadgroup owns 8 query rows of one KV head, one block of exact rows and
// up to 256 columns of o. It reads the block in tiles of 128 rows. Each of its 4 simdgroups reads 32 rows of a tile and
// has its own softmax. The simdgroups are merged at the end. Registers hold scores [32, 8] and o [columns, 8].
// Threadgroup memory holds q, and later the other simdgroups' o.
// Layout: q [B, HQ, L, D], exact keys and values [B, HK, rows, D], all with strides; o_partials [B, HQ, L, blocks, D],
// m and l [B, HQ, L, blocks] f32, contiguous. For a block:
//     m = max of scale q k,    l = sum of exp(scale q k - m),    o = sum of exp(scale q k - m) v.
#include "aura/parameters.h"
#include "aura/stage_queries.h"
#include "aura/visibility.h"
#include "core/row_attention.h"

GDN_CONSTANT int kExactSimdgroups = kAuraThreads / 32;
GDN_CONSTANT int kExactKeysOfSimdgroup = kExactKeys / kExactSimdgroups;

METAL_FUNC constexpr int exact_columns(int D) { return D < kExactColumns ? D : kExactColumns; }

// Returns the first exact row at or after a position. A row before `sinks` has its index as its position. The other
// rows follow the codes.
METAL_FUNC int exact_row_at(constant ExactParameters& parameters, int position) {
  return position <= parameters.sinks ? position : max(parameters.sinks, position - parameters.coded);
}

// Returns the exact rows of a block that a query row sees.
METAL_FUNC KeyRange
seen_exact_rows(constant ExactParameters& parameters, device const int* starts, int batch, int row, KeyRange block) {
  const int position = parameters.q_offset + row / parameters.ratio;
  int first = parameters.start_words != 0 ? start_of(starts, parameters.start_words, batch) : 0;
  if (parameters.window > 0) first = max(first, position - parameters.window + 1);
  KeyRange range;
  range.first = max(block.first, exact_row_at(parameters, first));
  range.last = parameters.causal != 0 ? min(block.last, exact_row_at(parameters, position + 1)) : block.last;
  return range;
}

// Reads exact rows from `first` on. Rows past `last`, the last one that any query sees, repeat it.
template <typename T>
struct ExactRows {
  device const T* rows;
  int64_t stride;
  int first, last;
  bool has_vectors;

  METAL_FUNC device const T* at(int key, int column) const { return rows + min(first + key, last) * stride + column; }
  METAL_FUNC float4 four(int key, int column) const {
    device const T* source = at(key, column);
    if (has_vectors) return float4(*(device const vec<T, 4>*)source);
    return float4(float(source[0]), float(source[1]), float(source[2]), float(source[3]));
  }
  METAL_FUNC float2 two(int key, int column) const {
    device const T* source = at(key, column);
    if (has_vectors) return float2(*(device const vec<T, 2>*)source);
    return float2(float(source[0]), float(source[1]));
  }
};

template <typename T, int D>
[[kernel]] void aura_flash_exact(
    device const T* q [[buffer(0)]],
    device const T* keys [[buffer(1)]],
    device const T* values [[buffer(2)]],
    device const int* starts [[buffer(3)]],
    device float* o_partials [[buffer(4)]],
    device float* m_partials [[buffer(5)]],
    device float* l_partials [[buffer(6)]],
    constant ExactParameters& parameters [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int kOwn = exact_columns(D);  // columns of o
  constexpr int kBlocks = kExactKeysOfSimdgroup / 8;
  static_assert(D % 16 == 0 && D % kOwn == 0, "a vector is whole pairs of fragments, and whole groups of columns");
  static_assert(kExactQueryRows == 8, "the rows are a fragment's columns");
  threadgroup float2 shared[D * 4];
  threadgroup float2 states[kExactSimdgroups * 8];

  const int row_tiles = (parameters.rows + kExactQueryRows - 1) / kExactQueryRows;
  const int block = int(group.x) / (D / kOwn);
  const int first_column = int(group.x) % (D / kOwn) * kOwn;
  const int kv_head = int(group.y) / row_tiles;
  const int first_row = int(group.y) % row_tiles * kExactQueryRows;
  const int last_row = min(first_row + kExactQueryRows, parameters.rows) - 1;
  const int batch = int(group.z);
  stage_queries<T, D, 4>(shared, q, parameters, batch, kv_head, first_row, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Later queries see later rows, so the first and the last query bound what the others see.
  KeyRange whole;
  whole.first = int(min(int64_t(block) * parameters.block_size, int64_t(parameters.exact)));
  whole.last = int(min(int64_t(whole.first) + parameters.block_size, int64_t(parameters.exact)));
  const int first_seen = seen_exact_rows(parameters, starts, batch, first_row, whole).first;
  const int last_seen = seen_exact_rows(parameters, starts, batch, last_row, whole).last;
  const LanePosition at = lane_position(lane);
  const int own_row = first_row + at.column;
  const KeyRange first_range = seen_exact_rows(parameters, starts, batch, min(own_row, last_row), whole);
  const KeyRange second_range = seen_exact_rows(parameters, starts, batch, min(own_row + 1, last_row), whole);
  SeenKeys seen;
  seen.first = int2(first_range.first, second_range.first);
  seen.last = int2(first_range.last, second_range.last);

  RowState state = no_keys();
  float2 o[kOwn / 8];
  UNROLL for (int part = 0; part < kOwn / 8; ++part) o[part] = float2(0.0f);
  StagedQuery query;
  query.staged = shared;
  query.lane = lane;
  device const T* own_keys = keys + offset_of(parameters.keys, batch, kv_head, 0);
  device const T* own_values = values + offset_of(parameters.values, batch, kv_head, 0) + first_column;
  ExactRows<T> rows;
  rows.last = last_seen - 1;
  rows.has_vectors = parameters.has_vectors != 0;
  for (int first = first_seen; first < last_seen; first += kExactKeys) {
    rows.first = first + int(simdgroup) * kExactKeysOfSimdgroup;  // may lie past the last row; its weight is then 0
    rows.rows = own_keys;
    rows.stride = parameters.keys.token;
    float2 scores[kBlocks];
    multiply_keys<D, kBlocks>(scores, rows, query, at);
    const float2 rescale = online_softmax<kBlocks>(scores, state, parameters.scale, rows.first + at.row, seen);
    UNROLL for (int part = 0; part < kOwn / 8; ++part) o[part] *= rescale;
    rows.rows = own_values;
    rows.stride = parameters.values.token;
    multiply_values<kOwn, kBlocks>(o, scores, rows, at);
  }
  merge_simdgroups<kOwn, kExactSimdgroups>(o, state, shared, states, at, simdgroup, lane);
  if (simdgroup > 0) return;
  UNROLL for (int i = 0; i < 2; ++i) {
    if (own_row + i <= last_row) {
      const RowPlace place = row_place(parameters, batch, kv_head, own_row + i);
      const int64_t target = place.index * parameters.blocks + parameters.first_block + block;
      store_row<kOwn>(o_partials + target * D + first_column, o, i, 1.0f, at.row);
      if (first_column == 0 && at.row == 0) {
        m_partials[target] = state.m[i];
        l_partials[target] = state.l[i];
      }
    }
  }
}
