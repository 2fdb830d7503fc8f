// Attention to the pages of a cache. One call takes both prompts and decoded tokens, packed.
#pragma once
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

  void check(const char* op) {
    const Check<Int> check(op, "q", q);
    auto& s = shape;
    check_queries(check, s, out, q);
    check.is_activation("key_cache", key_cache).dimensions(4, "[blocks, block_size, HK, D]");
    check_blocks(check, s, "key_cache", key_cache);
    check.shape("key_cache", key_cache, "[blocks, block_size, HK, D]", {s.blocks, s.block_size, s.HK, s.D});
    check.like("value_cache", value_cache, "key_cache", key_cache);
    check_unit_stride(check, "key_cache", key_cache);
    check_unit_stride(check, "value_cache", value_cache);
    check_sequences_of_pages(check, s, sequences);
    check_sinks(check, s, sinks);
    if constexpr (is_run<Int>) check_pages(check.op(), s, sequences);
  }

  void outputs() const {}
};

}  // namespace torch_gdn
