// Finds the means of the tiles of pages that new keys begin.
#pragma once
#include "ops/aura/ring_buffer.h"
#include "ops/op.h"
#include "shaders/aura/code_sizes.h"

namespace torch_gdn {

// A tile is 128 tokens of a sequence, from a multiple of 128 on. If its first token is new, its mean becomes that of
// the newest keys up to its last new token: up to 128 of the new keys and of the exact rows before them (exact_rows.h),
// but for the first `sinks` tokens. With fewer than kLeastKeysOfMean of them, it becomes the mean of the tile before,
// if there is one. Other tiles keep their means.
template <typename Int>
struct AuraPagedTileMeans {
  static constexpr const char* kSchema =
      "aura_paged_tile_means_(Tensor keys, Tensor(a!) tile_means, Tensor block_table, Tensor cu_seqlens, "
      "Tensor seq_lens, Tensor exact_keys, Tensor exact_slots, Tensor exact_starts, *, SymInt max_query_len, "
      "SymInt max_seq_len, SymInt exact_sinks=0, SymInt tail=0) -> ()";

  Tensor keys;                    // [T, HK, D], packed by cu_seqlens
  Tensor tile_means;              // [blocks, tiles of a block, HK, D]
  PagedSequences<Int> sequences;  // causal, without a window
  Tensor exact_keys;              // [slots, rows, HK, D]
  Tensor exact_slots, exact_starts;
  Int sinks, tail;

  PagedShape<Int> shape;

  auto arguments() {
    auto& [block_table, cu_seqlens, seq_lens, max_query_len, max_seq_len, causal, window] = sequences;
    causal = true, window = 0;
    return std::tie(keys, tile_means, block_table, cu_seqlens, seq_lens, exact_keys, exact_slots, exact_starts,
                    max_query_len, max_seq_len, sinks, tail);
  }

  void check(const char* op) {
    const Check<Int> check(op, "keys", keys);
    check.is_activation("keys", keys).dimensions(3, "[T, HK, D]");
    auto& s = shape;
    s.T = size_of<Int>(keys, 0), s.HK = size_of<Int>(keys, 1), s.D = size_of<Int>(keys, 2);
    s.HQ = s.HK;
    check_unit_stride(check, "keys", keys);
    check.is_of_dtype("tile_means", tile_means, at::kHalf).dimensions(4, "[blocks, block_size / 128, HK, D]");
    const Int tiles = size_of<Int>(tile_means, 1);
    s.blocks = size_of<Int>(tile_means, 0), s.block_size = tiles * kTokensOfTile;
    check.in_range("tile_means", "blocks of 1 to 2^23 tiles", tiles, 1, kMostKeys / kTokensOfTile);
    check.shape("tile_means", tile_means, "[blocks, block_size / 128, HK, D]", {s.blocks, tiles, s.HK, s.D});
    check_unit_stride(check, "tile_means", tile_means);
    check_sequences_of_pages(check, s, sequences);
    check.dimensions("exact_keys", exact_keys, 4, "[slots, rows, HK, D]");
    const Int slots = size_of<Int>(exact_keys, 0), rows = size_of<Int>(exact_keys, 1);
    check_exact_cache(check, s, "exact_keys", exact_keys, slots, rows, "keys", keys);
    check_numbers(check, s, "exact_slots", exact_slots);
    check_numbers(check, s, "exact_starts", exact_starts);
    check_rows_of_slot(check, rows, sinks, tail);
    if constexpr (is_run<Int>) {
      check_pages(check.op(), s, sequences);
      check_cpu_slots(check, "exact_slots", exact_slots, sequences.cu_seqlens, slots);
    }
  }

  void outputs() const {}
};

}  // namespace torch_gdn
