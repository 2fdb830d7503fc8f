// Pass 1 for the exact rows of a cache. One threadgroup owns 8 query rows of one KV head, one block of exact rows and
// up to 256 columns of o. It reads the block in tiles of 128 rows. Each of its 4 simdgroups reads 32 rows of a tile and
// has its own softmax. The simdgroups are merged at the end. Registers hold scores [32, 8] and o [columns, 8].
// Threadgroup memory holds q, and later the other simdgroups' o.
// Layout: q [B, HQ, L, D], exact keys and values [B, HK, rows, D], all with strides; o_partials [B, HQ, L, blocks, D],
// m and l [B, HQ, L, blocks] f32, contiguous. For a block:
//     m = max of scale q k,    l = sum of exp(scale q k - m),    o = sum of exp(scale q k - m) v.
#include "aura/parameters.h"
#include "aura/visibility.h"

GDN_CONSTANT int kExactSimdgroups = kAuraThreads / 32;
GDN_CONSTANT int kExactKeysOfSimdgroup = kExactKeys / kExactSimdgroups;

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
  const int last = parameters.causal != 0 ? min(block.last, exact_row_at(parameters, position + 1)) : block.last;
  return {max(block.first, exact_row_at(parameters, first)), last};
}

// Reads exact rows from `first` on. Rows past `last`, the last one that any query sees, repeat it.
template <typename T>
struct ExactRows {
  device const T* rows;
  int64_t stride;
  int first, last;
  bool has_vectors;

  METAL_FUNC device const T* at(int key, int column) const { return rows + min(first + key, last) * stride + column; }
  METAL_FUNC float4 four(int key, int column) const { return load_four(at(key, column), has_vectors); }
  METAL_FUNC float2 two(int key, int column) const { return load_two(at(key, column), has_vectors); }
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
  constexpr int kOwn = smaller(D, kExactColumns);  // columns of o
  constexpr int kBlocks = kExactKeysOfSimdgroup / 8;
  static_assert(D % 16 == 0 && D % kOwn == 0, "a vector is whole pairs of fragments, and whole groups of columns");
  static_assert(kExactQueryRows == 8, "the rows are a fragment's columns");
  threadgroup float2 shared[D * 4 + kExactSimdgroups * 8];

  const FlashTile tile = flash_tile<kExactQueryRows, D, kOwn>(parameters, group);
  stage_queries<T, D, 4>(shared, q, parameters, tile, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Later queries see later rows, so the first and the last query bound what the others see.
  KeyRange whole{int(min(int64_t(tile.block) * parameters.block_size, int64_t(parameters.exact))), 0};
  whole.last = int(min(int64_t(whole.first) + parameters.block_size, int64_t(parameters.exact)));
  const int first_seen = seen_exact_rows(parameters, starts, tile.batch, tile.first_row, whole).first;
  const int last_seen = seen_exact_rows(parameters, starts, tile.batch, tile.last_row, whole).last;
  const LanePosition at = lane_position(lane);
  const int own_row = min(tile.first_row + at.column, tile.last_row);
  const KeyRange own = seen_exact_rows(parameters, starts, tile.batch, own_row, whole);
  const KeyRange next = seen_exact_rows(parameters, starts, tile.batch, min(own_row + 1, tile.last_row), whole);
  const SeenKeys seen{int2(own.first, next.first), int2(own.last, next.last)};

  RowState state = no_keys();
  float2 o[kOwn / 8];
  UNROLL for (int part = 0; part < kOwn / 8; ++part) o[part] = float2(0.0f);
  const StagedQuery query{shared, lane};
  device const T* own_keys = keys + offset_of(parameters.keys, tile.batch, tile.kv_head, 0);
  device const T* own_values = values + offset_of(parameters.values, tile.batch, tile.kv_head, 0) + tile.first_column;
  ExactRows<T> rows;
  rows.last = last_seen - 1;
  rows.has_vectors = parameters.has_vectors != 0;
  for (int first = first_seen; first < last_seen; first += kExactKeys) {
    rows.first = first + int(simdgroup) * kExactKeysOfSimdgroup;  // may lie past the last row; its weight is then 0
    rows.rows = own_keys;
    rows.stride = parameters.keys.token;
    float2 scores[kBlocks];
    multiply_keys<D, kBlocks>(scores, rows, query, at);
    const ScaledKeys scaled{parameters.scale};
    const float2 rescale = online_softmax<kBlocks>(scores, state, scaled, rows.first + at.row, seen);
    UNROLL for (int part = 0; part < kOwn / 8; ++part) o[part] *= rescale;
    rows.rows = own_values;
    rows.stride = parameters.values.token;
    multiply_values<kOwn, kBlocks>(o, scores, rows, at);
  }
  merge_simdgroups<kOwn, kExactSimdgroups, D * 4>(o, state, shared, at, simdgroup, lane);
  if (simdgroup > 0) return;
  store_partials<D, kOwn, 4>(
      {o_partials, m_partials, l_partials}, o, state, parameters, tile, parameters.first_block + tile.block, at);
}
