// Computes the means of the tiles that new keys begin. A thread owns one channel of one KV head. It adds up the keys in
// the order of their tokens, in f32. A threadgroup owns 128 adjacent channels of one tile: group.x is the sequence,
// group.y the channels, and group.z the tile among those that begin with the sequence's new tokens.
// Layout: keys [T, HK, D], exact rows [slots, rows, HK, D], tile_means [blocks, tiles of a block, HK, D] f16, with
// strides.
// csrc/ops/aura/pages.h says which keys a mean covers.
#include "attention/sequences.h"
#include "aura/pages.h"

template <typename T>
[[kernel]] void aura_paged_tile_means(
    device const T* keys [[buffer(0)]],
    device const T* exact_keys [[buffer(1)]],
    device const int* exact_slots [[buffer(2)]],
    device const int* exact_starts [[buffer(3)]],
    device const int* block_table [[buffer(4)]],
    device const int* cu_seqlens [[buffer(5)]],
    device const int* seq_lens [[buffer(6)]],
    device half* tile_means [[buffer(7)]],
    device ErrorLog* errors [[buffer(8)]],
    constant PagedTileMeansParameters& parameters [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int n = int(group.x);
  const PagedSequence sequence = paged_sequence({cu_seqlens, seq_lens}, parameters.paged, n, lane);
  const int64_t slot = read_index(exact_slots, n * parameters.slot, parameters.slot_bytes);
  if (group.y == 0 && group.z == 0 && thread_index == 0) {
    report_sequence({cu_seqlens, seq_lens}, parameters.paged, n, errors);
    if (sequence.queries > 0 && slot >= parameters.slots) {
      report_error(errors, parameters.paged.op, "exact_slots: expected slots of exact_keys, got ", slot, n, __LINE__);
    }
  }
  const int first_new = max(0, sequence.keys - sequence.queries);
  const int64_t begun = (first_new + kTokensOfTile - 1) / kTokensOfTile + int64_t(group.z);
  const int channel = int(group.y) * kMeanThreads + int(thread_index);
  if (sequence.queries == 0 || begun * kTokensOfTile >= sequence.keys ||
      channel >= parameters.paged.kv_heads * parameters.head_size)
    return;
  const int head = channel / parameters.head_size;
  const int column = channel % parameters.head_size;

  // Keys [first_held, first_new) are exact rows. The other keys up to `last` are new.
  const int first_token = int(min(begun * kTokensOfTile, int64_t(sequence.keys)));
  const int last = min(first_token + kTokensOfTile, sequence.keys);
  const int lowest = max(last - kTokensOfTile, parameters.sinks);
  int first_held = max(lowest, first_new - parameters.tail);
  const int64_t start = read_index(exact_starts, n * parameters.start, parameters.start_bytes);
  first_held = int(clamp(start, int64_t(first_held), int64_t(max(first_held, first_new))));
  if (slot < 0 || slot >= parameters.slots) first_held = first_new;
  const int held = max(0, first_new - first_held);
  const int from_new = max(0, last - max(lowest, first_new));

  const KeyPlace place = key_place(block_table, parameters.paged, n, first_token, errors);
  KeyPlace mean_place = place;
  mean_place.offset = place.offset / kTokensOfTile;
  device half* target = tile_means + offset_of(parameters.tile_means, mean_place, head) + column;
  if (held + from_new < kLeastKeysOfMean && begun > 0) {
    mean_place = key_place(block_table, parameters.paged, n, first_token - kTokensOfTile, errors);
    mean_place.offset /= kTokensOfTile;
    *target = tile_means[offset_of(parameters.tile_means, mean_place, head) + column];
    return;
  }
  float sum = 0.0f;
  for (int position = first_new - held; position < first_new; ++position) {
    const KeyPlace row{slot, parameters.sinks + position % parameters.ring};
    sum += float(exact_keys[offset_of(parameters.exact_keys, row, head) + column]);
  }
  for (int position = last - from_new; position < last; ++position) {
    const int64_t token = sequence.first + (position - first_new);
    sum += float(keys[token * parameters.keys.token + head * parameters.keys.head + column]);
  }
  const float mean = held + from_new > 0 ? sum / float(held + from_new) : 0.0f;
  *target = fabs(mean) < 65520.0f ? half(mean) : half(0.0f);  // a larger mean would become infinite
}
