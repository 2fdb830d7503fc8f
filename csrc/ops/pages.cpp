#include "ops/pages.h"

#include <algorithm>

#include "ops/indices.h"

namespace torch_gdn {

namespace {

struct Queries {
  int64_t sequence, first, count;
};

// Returns the queries of each sequence that has queries.
std::vector<Queries> queries_of(const char* op, const PagedShape<>& s, const Tensor& cu_seqlens) {
  const Indices at(cu_seqlens);
  TORCH_CHECK_VALUE(at[0] == 0, op, ": cu_seqlens: expected the first boundary to be 0, got ", at[0]);
  TORCH_CHECK_VALUE(at[s.N] <= s.T, op, ": cu_seqlens: expected boundaries up to the ", s.T, " rows of q, got ",
                    at[s.N]);
  std::vector<Queries> queries;
  for (int64_t n = 0; n < s.N; ++n) {
    TORCH_CHECK_VALUE(at[n] <= at[n + 1], op, ": cu_seqlens: expected ascending boundaries, got ", at[n], " before ",
                      at[n + 1], " at index ", n);
    if (at[n] < at[n + 1]) queries.push_back({n, at[n], at[n + 1] - at[n]});
  }
  return queries;
}

}  // namespace

void check_pages(const char* op, const PagedShape<>& s, const PagedSequences<int64_t>& sequences) {
  const auto& [block_table, cu_seqlens, seq_lens, max_query_len, max_seq_len, causal, window] = sequences;
  if (!block_table.is_cpu() || !cu_seqlens.is_cpu() || !seq_lens.is_cpu()) return;
  const Indices table(block_table), lengths(seq_lens);
  for (const auto& [n, first, count] : queries_of(op, s, cu_seqlens)) {
    const int64_t keys = lengths[n];
    TORCH_CHECK_VALUE(count <= max_query_len, op, ": max_query_len: expected at least the queries of a sequence, got ",
                      max_query_len, " for ", count, " of sequence ", n);
    TORCH_CHECK_VALUE(keys >= count && keys <= s.table_blocks * s.block_size, op,
                      ": seq_lens: expected at least the queries of a sequence and at most the tokens of its blocks, ",
                      "got ", keys, " for ", count, " queries and ", s.table_blocks, " blocks of ", s.block_size);
    TORCH_CHECK_VALUE(keys <= max_seq_len, op, ": max_seq_len: expected at least the keys of a sequence, got ",
                      max_seq_len, " for ", keys, " of sequence ", n);
    const int64_t unseen = window > 0 ? std::max<int64_t>(0, keys - count + 1 - window) : 0;
    for (int64_t i = unseen / s.block_size; i * s.block_size < keys; ++i) {
      const int64_t block = table.at(n, i);
      TORCH_CHECK_VALUE(block >= 0 && block < s.blocks, op, ": block_table: expected blocks from 0 to ", s.blocks - 1,
                        ", got ", block, " at ", i, " of sequence ", n);
    }
  }
}

}  // namespace torch_gdn
