// Merges the partial results of sequences whose keys were split. A simdgroup owns a query row, and a lane every 32nd
// element of o, in f32. The rows of other sequences are already in `out`.
// Layout: partials [N, HK, rows of a tile, splits, D] and [.., splits] f32, out [T, HQ, D] with strides.
#include "attention/output.h"
#include "attention/paged_attention.h"

template <typename T, int D>
[[kernel]] void paged_attention_merge(
    device const float* o_partials [[buffer(0)]],
    device const float* m_partials [[buffer(1)]],
    device const float* l_partials [[buffer(2)]],
    device const int* cu_seqlens [[buffer(3)]],
    device const int* seq_lens [[buffer(4)]],
    device const float* sinks [[buffer(5)]],
    device T* out [[buffer(6)]],
    constant PagedParameters& parameters [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int kOwn = (D + 31) / 32;
  const int row = int(group.x) * kMergeRows + int(simdgroup);
  const int kv_head = int(group.y);
  RowTile tile{paged_sequence({cu_seqlens, seq_lens}, parameters, int(group.z), lane), 0, 0};
  tile.rows = min(parameters.rows, rows_of(parameters, tile.sequence.queries));
  if (row >= tile.rows) return;
  const int splits = splits_of(parameters, tile, seen_by_tile(parameters, tile));
  if (splits == 1) return;
  const int64_t first = partial_row(parameters, tile.sequence.index, kv_head, row) * parameters.splits;

  float largest = -INFINITY;
  for (int split = 0; split < splits; ++split) largest = fmax(largest, m_partials[first + split]);
  float values[kOwn];
  UNROLL for (int i = 0; i < kOwn; ++i) values[i] = 0.0f;
  float sum = 0.0f;
  for (int split = 0; split < splits; ++split) {
    const float l = l_partials[first + split];
    const float factor = l == 0.0f ? 0.0f : exp(m_partials[first + split] - largest);
    sum = fma(factor, l, sum);
    device const float* part = o_partials + (first + split) * D;
    UNROLL for (int i = 0; i < kOwn; ++i) values[i] = fma(factor, part[min(i * 32 + int(lane), D - 1)], values[i]);
  }
  const int64_t token = tile.sequence.first + row / parameters.ratio;
  const int64_t head = int64_t(kv_head) * parameters.ratio + row % parameters.ratio;
  const float factor = normaliser(largest, sum, sinks, parameters.has_sinks, head);
  device T* target = out + token * parameters.out.token + head * parameters.out.head;
  UNROLL for (int i = 0; i < kOwn; ++i) {
    if (i * 32 + int(lane) < D) target[i * 32 + int(lane)] = T(values[i] * factor);
  }
}
