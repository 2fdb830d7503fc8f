// The ops on pages that hold AURA's codes.
#pragma once
#include "ops/aura/aura.h"
#include "ops/indices.h"
#include "ops/op.h"
#include "ops/pages.h"
#include "shaders/aura/code_sizes.h"

namespace torch_gdn {

// Keys and values that are stored as the model computed them, not as codes. A slot has `sinks` rows for the first
// tokens of a sequence, and a ring for later ones. Sequence n finds its first tokens in slot sink_slots[n]. The `tail`
// tokens before the queries, from starts[n] on, are in slot slots[n], where token p has row
//     sinks + p % (rows - sinks)
// A negative slot has no rows. The queries' own tokens are rows of new_keys and new_values.
template <typename Int>
struct PagedExactRows {
  optional<Tensor> keys, values;          // [slots, rows, HK, D]
  optional<Tensor> slots, starts;         // [N], int32 or int64
  optional<Tensor> sink_slots;            // [N], int32 or int64
  optional<Tensor> new_keys, new_values;  // [T, HK, D], packed like q
  Int sinks = 0, tail = 0;

  bool present() const { return keys.has_value(); }
};

// Checks the slots of sequences with queries. If the slots are on the device, the kernel checks them.
template <typename Int>
void check_cpu_slots(const Check<Int>& check, const char* argument, const Tensor& slots, const Tensor& cu_seqlens,
                     int64_t count) {
  if (!slots.is_cpu() || !cu_seqlens.is_cpu()) return;
  const Indices at(slots), boundaries(cu_seqlens);
  for (int64_t n = 0; n < slots.size(0); ++n) {
    if (boundaries[n] == boundaries[n + 1]) continue;
    check.value(at[n] < count, argument, "slots of exact_keys", at[n], " for ", count, " slots");
  }
}

template <typename Int>
void check_exact_cache(const Check<Int>& check, const PagedShape<Int>& s, const char* argument, const Tensor& x,
                       const Int& count, const Int& rows, const char* like, const Tensor& other) {
  check.same_dtype(argument, x, like, other).shape("[slots, rows, HK, D]", {count, rows, s.HK, s.D});
  check_unit_stride(check, argument, x);
}

template <typename Int>
void check_rows_of_slot(const Check<Int>& check, const Int& rows, const Int& sinks, const Int& tail) {
  check.in_range("exact_keys", "slots of at most 2^30 rows", rows, 0, kMostKeys);
  check.value(sym_ge(sinks, Int(0)), "exact_sinks", "at least 0", sinks);
  check.value(sym_le(sinks, rows), "exact_sinks", "at most the rows of a slot", sinks, " for ", rows);
  check.value(sym_ge(tail, Int(0)), "tail", "at least 0", tail);
  check.value(sym_le(tail, rows - sinks), "tail", "at most the rows of a slot after the sinks", tail, " for ",
              rows - sinks);
}

template <typename Int>
void check_exact_rows(const Check<Int>& check, const PagedShape<Int>& s, const Tensor& q, const Tensor& cu_seqlens,
                      const PagedExactRows<Int>& exact) {
  const auto& [keys, values, slots, starts, sink_slots, new_keys, new_values, sinks, tail] = exact;
  const auto together = [&](const char* argument, const optional<Tensor>& x) {
    check.value(x.has_value() == keys.has_value(), argument, "a tensor if exact_keys is one, else None",
                x.has_value() ? "a tensor" : "None");
  };
  together("exact_values", values), together("exact_slots", slots), together("exact_starts", starts);
  together("exact_sink_slots", sink_slots);
  together("new_keys", new_keys), together("new_values", new_values);
  if (!exact.present()) {
    check.value(sym_eq(sinks, Int(0)), "exact_sinks", "0 without exact_keys", sinks);
    check.value(sym_eq(tail, Int(0)), "tail", "0 without exact_keys", tail);
    return;
  }
  check.dimensions("exact_keys", *keys, 4, "[slots, rows, HK, D]");
  const Int count = size_of<Int>(*keys, 0), rows = size_of<Int>(*keys, 1);
  const auto check_new = [&](const char* argument, const Tensor& x) {
    check.same_dtype(argument, x, "q", q).shape("[T, HK, D]", {s.T, s.HK, s.D});
    check_unit_stride(check, argument, x);
  };
  check_exact_cache(check, s, "exact_keys", *keys, count, rows, "q", q);
  check_exact_cache(check, s, "exact_values", *values, count, rows, "q", q);
  check.is_number_per_sequence("exact_slots", *slots, s.N, "shape [N]");
  check.is_number_per_sequence("exact_starts", *starts, s.N, "shape [N]");
  check.is_number_per_sequence("exact_sink_slots", *sink_slots, s.N, "shape [N]");
  check_new("new_keys", *new_keys), check_new("new_values", *new_values);
  check_rows_of_slot(check, rows, sinks, tail);
  if constexpr (is_run<Int>) {
    check_cpu_slots(check, "exact_slots", *slots, cu_seqlens, count);
    check_cpu_slots(check, "exact_sink_slots", *sink_slots, cu_seqlens, count);
  }
}

// The means that were subtracted from the keys of tiles before the keys were encoded. They are [blocks, tiles of a
// block, HK, D]. A block has whole tiles, so a tile lies in one block.
template <typename Int>
void check_means_of_pages(const Check<Int>& check, const PagedShape<Int>& s, const char* argument, const Tensor& x) {
  check.is_of_dtype(argument, x, at::kHalf);
  check.value(sym_eq(s.block_size % kTokensOfTile, Int(0)), argument, "blocks of a multiple of 128 tokens",
              s.block_size);
  check.shape(argument, x, "[blocks, block_size / 128, HK, D]", {s.blocks, s.block_size / kTokensOfTile, s.HK, s.D});
  check_unit_stride(check, argument, x);
}

// Attention to pages that hold AURA's codes, and to exact rows: rotates q, attends, and rotates the result back.
template <typename Int>
struct AuraPagedAttention {
  static constexpr const char* kSchema =
      "aura_paged_attention_(Tensor(a!) out, Tensor q, Tensor key_codes, Tensor key_norms, Tensor key_codebook, "
      "Tensor key_signs, Tensor value_codes, Tensor value_norms, Tensor value_codebook, Tensor value_signs, "
      "Tensor block_table, Tensor cu_seqlens, Tensor seq_lens, *, SymInt max_query_len, SymInt max_seq_len, "
      "float? scale=None, bool causal=True, int window=0, Tensor? sinks=None, Tensor? exact_keys=None, "
      "Tensor? exact_values=None, Tensor? exact_slots=None, Tensor? exact_starts=None, Tensor? exact_sink_slots=None, "
      "Tensor? new_keys=None, Tensor? new_values=None, SymInt exact_sinks=0, SymInt tail=0, "
      "Tensor? key_tile_means=None) -> ()";

  // Codes [blocks, block_size, HK, words], norms [blocks, block_size, HK], and means of keys as check_means_of_pages
  // has them.
  Tensor out, q;
  CodedTensor key, value;
  Tensor key_signs, value_signs;
  PagedSequences<Int> sequences;
  optional<double> scale;
  optional<Tensor> sinks;
  PagedExactRows<Int> exact;

  PagedShape<Int> shape;
  Code key_code, value_code;

  auto arguments() {
    auto& [block_table, cu_seqlens, seq_lens, max_query_len, max_seq_len, causal, window] = sequences;
    return std::tie(out, q, key.codes, key.norms, key.codebook, key_signs, value.codes, value.norms, value.codebook,
                    value_signs, block_table, cu_seqlens, seq_lens, max_query_len, max_seq_len, scale, causal, window,
                    sinks, exact.keys, exact.values, exact.slots, exact.starts, exact.sink_slots, exact.new_keys,
                    exact.new_values, exact.sinks, exact.tail, key.tile_means);
  }

  void check(const char* op) {
    const Check<Int> check(op, "q", q);
    check_queries(check, shape, out, q);
    auto& s = shape;
    check_head_size(check, "q", s.D);
    check.is_int32("key_codes", key.codes).dimensions(4, "[blocks, block_size, HK, ceil(D * bits / 32)]");
    check_blocks(check, shape, "key_codes", key.codes);
    key_code = check_coded(check, "key_codes", "key_norms", "key_codebook", "key_signs", key, key_signs);
    value_code = check_coded(check, "value_codes", "value_norms", "value_codebook", "value_signs", value, value_signs);
    check_sequences_of_pages(check, s, sequences);
    check_sinks(check, s, sinks);
    if constexpr (is_run<Int>) check_pages(check.op(), s, sequences);
    check_exact_rows(check, s, q, sequences.cu_seqlens, exact);
    if (key.tile_means.has_value()) check_means_of_pages(check, s, "key_tile_means", *key.tile_means);
  }

  void outputs() const {}

 private:
  Code check_coded(const Check<Int>& check, const char* codes_name, const char* norms_name, const char* codebook_name,
                   const char* signs_name, const CodedTensor& coded, const Tensor& signs) const {
    const Sizes<Int> rows = {shape.blocks, shape.block_size, shape.HK};
    const Code code = check_codebook(check, codebook_name, coded.codebook);
    check_codes(check, codes_name, coded.codes, rows, shape.D, code);
    check_unit_stride(check, codes_name, coded.codes);
    check_norms(check, norms_name, coded.norms, rows);
    check_table(check, signs_name, signs, "[D]", shape.D);
    return code;
  }
};

// Finds the means of the tiles of pages that new keys begin. A tile is 128 tokens of a sequence, from a multiple of 128
// on. If its first token is new, its mean becomes that of the newest keys up to its last new token: up to 128 of the
// new keys and of the exact rows before them (PagedExactRows), but for the first `sinks` tokens. With fewer than
// kLeastKeysOfMean of them, it becomes the mean of the tile before, if there is one. Other tiles keep their means.
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
    check.is_number_per_sequence("exact_slots", exact_slots, s.N, "shape [N]");
    check.is_number_per_sequence("exact_starts", exact_starts, s.N, "shape [N]");
    check_rows_of_slot(check, rows, sinks, tail);
    if constexpr (is_run<Int>) {
      check_pages(check.op(), s, sequences);
      check_cpu_slots(check, "exact_slots", exact_slots, sequences.cu_seqlens, slots);
    }
  }

  void outputs() const {}
};

}  // namespace torch_gdn
