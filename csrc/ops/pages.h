// A cache of pages, which are blocks of `block_size` tokens in any order. A block table lists the blocks of a sequence
// in order.
#pragma once
#include "ops/chunk_shape.h"

namespace torch_gdn {

constexpr int64_t kMostKeys = INT32_MAX / 2;

template <typename Int = int64_t>
struct PagedShape {
  Int T = 0, HQ = 0, HK = 0, D = 0;  // T: queries of all sequences, with padding
  Int N = 0;                         // number of sequences
  Int blocks = 0, block_size = 0;    // size of the pool
  Int table_blocks = 0;              // most blocks per sequence
};

// Sequence n has queries [cu_seqlens[n], cu_seqlens[n + 1]) and seq_lens[n] keys. The queries belong to the last of
// these keys.
template <typename Int>
struct PagedSequences {
  Tensor block_table, cu_seqlens, seq_lens;  // [N, table_blocks], [N + 1], [N], int32 or int64
  Int max_query_len, max_seq_len;            // the maxima per sequence that the host plans for
  bool causal;
  int64_t window;  // with 0, a query sees all keys
};

template <typename Int>
void check_queries(const Check<Int>& check, PagedShape<Int>& s, const Tensor& out, const Tensor& q) {
  const char* expected = "a head size that is a multiple of 16, up to 256";
  check.is_activation("q", q).dimensions(3, "[T, HQ, D]");
  s.T = size_of<Int>(q, 0), s.HQ = size_of<Int>(q, 1), s.D = size_of<Int>(q, 2);
  check.in_range("q", expected, s.D, 16, 256);
  check.value(sym_eq(s.D % 16, Int(0)), "q", expected, s.D);
  check.like("out", out, "q", q);
  check_unit_stride(check, "out", out);
}

// Takes pages [blocks, block_size, HK, ..].
template <typename Int>
void check_blocks(const Check<Int>& check, PagedShape<Int>& s, const char* argument, const Tensor& pages) {
  s.blocks = size_of<Int>(pages, 0), s.block_size = size_of<Int>(pages, 1), s.HK = size_of<Int>(pages, 2);
  check.in_range(argument, "blocks of 1 to 2^30 tokens", s.block_size, 1, kMostKeys);
  check_heads(check, argument, s.HK, "q", s.HQ);
}

template <typename Int>
void check_sinks(const Check<Int>& check, const PagedShape<Int>& s, const optional<Tensor>& sinks) {
  if (!sinks.has_value()) return;
  check.is_float32("sinks", *sinks).shape("[HQ]", {s.HQ});
}

// Checks the contents of tensors on the CPU. If a tensor is on the device, the kernels check it.
void check_pages(const char* op, const PagedShape<>& shape, const PagedSequences<int64_t>& sequences);

template <typename Int>
void check_sequences_of_pages(const Check<Int>& check, PagedShape<Int>& s, const PagedSequences<Int>& sequences) {
  const auto& [block_table, cu_seqlens, seq_lens, max_query_len, max_seq_len, causal, window] = sequences;
  check.is_index_array("block_table", block_table);
  check.is_index_array("cu_seqlens", cu_seqlens);
  check.is_index_array("seq_lens", seq_lens);
  check.value(seq_lens.dim() == 1, "seq_lens", "shape [N]", sizes_of<Int>(seq_lens));
  s.N = size_of<Int>(seq_lens, 0);
  check.value(cu_seqlens.dim() == 1 && holds(sym_eq(size_of<Int>(cu_seqlens, 0), s.N + 1)), "cu_seqlens",
              "shape [N + 1]", sizes_of<Int>(cu_seqlens), " for ", s.N, " sequences");
  check.value(block_table.dim() == 2 && holds(sym_eq(size_of<Int>(block_table, 0), s.N)), "block_table",
              "shape [N, blocks of a sequence]", sizes_of<Int>(block_table), " for ", s.N, " sequences");
  s.table_blocks = size_of<Int>(block_table, 1);
  check.in_range("max_query_len", "a number from 0 to 2^30", max_query_len, 0, kMostKeys);
  check.in_range("max_seq_len", "a number from 0 to 2^30", max_seq_len, 0, kMostKeys);
  check.value(window >= 0 && window <= kMostKeys, "window", "a window from 0 (none) to 2^30", window);
  check.value(window == 0 || causal, "window", "0 when causal is false", window);
}

}  // namespace torch_gdn
