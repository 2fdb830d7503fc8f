// Attention to the pages of a cache: prefill and decoding, packed in one call.
#pragma once
#include "ops/chunk_shape.h"
#include "ops/op.h"
#include "ops/pages.h"

namespace torch_gdn {

template <typename Int>
struct PagedAttention {
  static constexpr const char* kSchema =
      "paged_attention_(Tensor(a!) out, Tensor q, Tensor key_cache, Tensor value_cache, Tensor block_table, "
      "Tensor cu_seqlens, Tensor seq_lens, *, SymInt max_query_len, SymInt max_seq_len, float? scale=None, "
      "bool causal=True, int window=0, Tensor? sinks=None) -> ()";

  Tensor out, q, key_cache, value_cache;
  PagedSequences<Int> sequences;
  optional<double> scale;
  optional<Tensor> sinks;

  PagedShape<Int> shape;

  auto arguments() {
    auto& [block_table, cu_seqlens, seq_lens, max_query_len, max_seq_len, causal, window] = sequences;
    return std::tie(out, q, key_cache, value_cache, block_table, cu_seqlens, seq_lens, max_query_len, max_seq_len,
                    scale, causal, window, sinks);
  }

  void check() {
    const Check<Int> check("paged_attention_", "q", q);
    check.is_activation("q", q);
    check.dimensions("q", q, 3, "[T, HQ, D]");
    auto& s = shape;
    s.T = size_of<Int>(q, 0), s.HQ = size_of<Int>(q, 1), s.D = size_of<Int>(q, 2);
    check_size_of_heads(check, s.D);
    check.same_dtype("out", out, "q", q);
    check.same_shape("out", out, "q", q);
    check_rows_of_pages(check, "out", out);
    check.is_activation("key_cache", key_cache);
    check.dimensions("key_cache", key_cache, 4, "[blocks, block_size, HK, D]");
    s.blocks = size_of<Int>(key_cache, 0), s.block_size = size_of<Int>(key_cache, 1);
    s.HK = size_of<Int>(key_cache, 2);
    check.in_range("key_cache", "blocks of 1 to 2^30 tokens", s.block_size, 1, kMostKeys);
    check_heads(check, "key_cache", s.HK, "q", s.HQ);
    check.shape("key_cache", key_cache, "[blocks, block_size, HK, D]", {s.blocks, s.block_size, s.HK, s.D});
    check.same_dtype("value_cache", value_cache, "key_cache", key_cache);
    check.same_shape("value_cache", value_cache, "key_cache", key_cache);
    check_rows_of_pages(check, "key_cache", key_cache);
    check_rows_of_pages(check, "value_cache", value_cache);
    check_sequences_of_pages(check, s, sequences);
    if (sinks.has_value()) {
      check.is_float32("sinks", *sinks);
      check.shape("sinks", *sinks, "[HQ]", {s.HQ});
    }
    if constexpr (is_run<Int>) check_pages(check.op(), s, sequences);
  }

  void outputs() const {}

 private:
  static void check_size_of_heads(const Check<Int>& check, const Int& D) {
    const char* expected = "a head size that is a multiple of 16, up to 256";
    check.in_range("q", expected, D, 16, 256);
    check.value(sym_eq(D % 16, Int(0)), "q", expected, D);
  }
};

}  // namespace torch_gdn
