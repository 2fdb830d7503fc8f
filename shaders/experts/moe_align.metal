// Sorts the pairs of a token and an expert by expert, and divides the pairs of each expert into tiles of kTilePairs. A
// simdgroup owns one expert. It counts the pairs of lower experts, and lists its own pairs in ascending order. The last
// simdgroup owns the skipped pairs. Expert e, with `before` pairs of lower experts and `count` pairs of its own, writes
// tiles before / 32 + e up to (before + count) / 32 + e. These are enough for all its pairs, and every tile is written.
// Layout: topk_ids [T, k] with strides, sorted_pairs [T k], tiles as most_tiles() counts them.
#include "experts/pairs.h"
#include "experts/parameters.h"

template <int Threads>
[[kernel]] void moe_align(
    device const int* topk_ids [[buffer(0)]],
    device int* sorted_pairs [[buffer(1)]],
    device PairTile* tiles [[buffer(2)]],
    device ErrorLog* errors [[buffer(3)]],
    constant PairParameters& pairs [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  static_assert(Threads == 32, "a simdgroup owns an expert");
  const int expert = int(group.x);
  const bool is_last = expert == pairs.experts;
  int before = 0;
  int count = 0;
  for (int pair = int(lane); pair < pairs.count; pair += 32) {
    const int expert_id = expert_of_pair(topk_ids, pairs, pair);
    const bool is_left_out = expert_id == kLeftOut;
    if (is_left_out && is_last) report_pair(topk_ids, pairs, pair, errors);
    if (!is_left_out && expert_id < expert) ++before;
    if (is_left_out ? is_last : expert_id == expert) ++count;
  }
  before = simd_sum(before);
  count = simd_sum(count);

  int position = before;
  for (int base = 0; base < pairs.count; base += 32) {
    const int pair = base + int(lane);
    const int expert_id = pair < pairs.count ? expert_of_pair(topk_ids, pairs, pair) : pairs.experts + 1;
    const int is_own = (expert_id == kLeftOut ? is_last : expert_id == expert) ? 1 : 0;
    const int earlier = simd_prefix_exclusive_sum(is_own);
    if (is_own != 0) sorted_pairs[position + earlier] = pair;
    position += simd_sum(is_own);
  }

  const int first = before / kTilePairs + expert;
  const int end = is_last ? pairs.tiles : (before + count) / kTilePairs + expert + 1;
  for (int tile = first + int(lane); tile < end; tile += 32) {
    const int done = (tile - first) * kTilePairs;
    tiles[tile] = {expert, before + done, clamp(count - done, 0, kTilePairs)};
  }
}
