// Checks of numbers in tensors on the CPU. If a tensor is on the device, the kernels check it.
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "ops/indices.h"
#include "ops/pages.h"
#include "ops/ranges.h"
#include "ops/slots.h"

namespace torch_gdn {

namespace {

void check_chunk_rows(const char* op, const ChunkShape<>& s, int64_t chunks) {
  TORCH_CHECK_VALUE(s.NT >= chunks, op, ": chunk_indices: expected ", chunks,
                    " rows, one for each chunk of cu_seqlens, got ", s.NT);
}

// Returns those slots of the sequences that the host can read.
std::unordered_set<int64_t> slots_on_cpu(const StatePool& pool, int64_t N) {
  std::unordered_set<int64_t> used;
  if (!pool.indices.has_value()) {
    for (int64_t n = 0; n < N; ++n) used.insert(n);
  } else if (pool.indices->is_cpu()) {
    for_each_index(*pool.indices, [&](int64_t slot, int64_t) { used.insert(slot); });
  }
  return used;
}

struct Queries {
  int64_t sequence, first, count;
};

// Returns the queries of each sequence that has queries.
std::vector<Queries> queries_of(const char* op, const PagedShape<>& s, const Tensor& cu_seqlens) {
  const Indices at(cu_seqlens);
  TORCH_CHECK_VALUE(at[0] == 0, op, ": cu_seqlens: expected the first boundary to be 0, got ", at[0]);
  TORCH_CHECK_VALUE(at[s.N] <= s.T, op, ": cu_seqlens: expected boundaries up to the ", s.T, " rows of q, got ",
                    at[s.N]);
  check_ascending(op, at);
  std::vector<Queries> queries;
  for (int64_t n = 0; n < s.N; ++n) {
    if (at[n] < at[n + 1]) queries.push_back({n, at[n], at[n + 1] - at[n]});
  }
  return queries;
}

// The bytes [first, last) that range n writes.
struct Written {
  int64_t first, last, n;
};

void check_inside(const char* op, const char* argument, int64_t offset, int64_t size, int64_t n, int64_t bytes) {
  TORCH_CHECK_VALUE(offset >= 0 && offset <= bytes && size <= bytes - offset, op, ": ", argument,
                    ": expected ranges within the pool's ", bytes, " bytes, got ", size, " bytes at offset ", offset,
                    " for range ", n);
}

void refuse_overlap(const char* op, int64_t n, int64_t other) {
  TORCH_CHECK_VALUE(false, op, ": destination_offsets: expected no range to write what another one reads or writes, ",
                    "got range ", n, ", which overlaps range ", other);
}

std::vector<Written> written_by(const char* op, const std::vector<ByteRange>& ranges) {
  std::vector<Written> written;
  for (size_t n = 0; n < ranges.size(); ++n) {
    const auto& [source, destination, size] = ranges[n];
    if (size > 0) written.push_back({destination, destination + size, int64_t(n)});
  }
  std::sort(written.begin(), written.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (size_t i = 1; i < written.size(); ++i) {
    if (written[i].first < written[i - 1].last) refuse_overlap(op, written[i].n, written[i - 1].n);
  }
  return written;
}

}  // namespace

void check_ascending(const char* op, const Indices& at) {
  for (int64_t n = 0; n + 1 < at.size(); ++n) {
    TORCH_CHECK_VALUE(at[n] <= at[n + 1], op, ": cu_seqlens: expected ascending boundaries, got ", at[n], " before ",
                      at[n + 1], " at index ", n);
  }
}

void check_cu_seqlens(const char* op, const ChunkShape<>& s, const Tensor& cu_seqlens) {
  if (s.C > 0) check_chunk_rows(op, s, ceil_div(s.T, s.C));  // without rows, no kernel runs that could report this
  // Without sequences, no kernel runs that could report this either.
  TORCH_CHECK_VALUE(s.N > 0 || s.T == 0, op, ": cu_seqlens: expected shape [N + 1] with N >= 1 for ", s.T,
                    " tokens, got [1]");
  if (!cu_seqlens.is_cpu()) return;
  const Indices at(cu_seqlens);
  TORCH_CHECK_VALUE(at[0] == 0, op, ": cu_seqlens: expected the first boundary to be 0, got ", at[0]);
  TORCH_CHECK_VALUE(at[s.N] == s.T, op, ": cu_seqlens: expected the last boundary to be T = ", s.T, ", got ", at[s.N]);
  check_ascending(op, at);
  if (s.C == 0) return;
  int64_t chunks = 0;
  for (int64_t n = 0; n < s.N; ++n) chunks += ceil_div(at[n + 1] - at[n], s.C);
  check_chunk_rows(op, s, chunks);
}

void check_sequence_lengths(const char* op, const char* argument, const char* expected, const ChunkShape<>& s,
                            const optional<Tensor>& cu_seqlens, int64_t most) {
  if (!cu_seqlens->is_cpu()) return;
  const Indices at(*cu_seqlens);
  for (int64_t n = 0; n < s.N; ++n) {
    const int64_t tokens = at[n + 1] - at[n];
    TORCH_CHECK_VALUE(tokens <= most, op, ": ", argument, ": expected ", expected, ", got ", most, " for ", tokens,
                      " tokens");
  }
}

Tensor unit_last_stride(const Tensor& x, const char* name) {
  if (x.size(-1) <= 1 || x.stride(-1) == 1) return x;
  if (name != nullptr) {
    TORCH_WARN_ONCE("torch_gdn: ", name, " has a last stride of ", x.stride(-1),
                    " and is copied on every call; a last stride of 1 needs no copy (any other stride is free)");
  }
  return x.contiguous();
}

void check_state_indices(const char* op, const StatePool& pool) {
  if (!pool.indices->is_cpu()) return;
  const int64_t slots = pool.states.size(0);
  c10::SmallVector<std::pair<int64_t, int64_t>, 32> used;  // each slot with its position
  for_each_index(*pool.indices, [&](int64_t slot, int64_t i) {
    TORCH_CHECK_VALUE(slot < slots, op, ": state_indices: expected indices below the number of slots, got ", slot,
                      " for ", slots, " slots");
    if (slot > pool.null_index) used.emplace_back(slot, i);
  });
  std::ranges::sort(used);
  const auto twice = std::ranges::adjacent_find(used, {}, &std::pair<int64_t, int64_t>::first);
  TORCH_CHECK_VALUE(twice == used.end(), op, ": state_indices: expected each slot at most once, got ", twice->first,
                    " again at ", (twice + 1)->second);
}

void check_checkpoint_contents(const char* op, const StatePool& pool, const ChunkShape<>& s,
                               const optional<Tensor>& cu_seqlens, int64_t multiple) {
  if (!pool.checkpoint_offsets->is_cpu() || !pool.checkpoint_indices->is_cpu()) return;
  const Indices offset(*pool.checkpoint_offsets), index(*pool.checkpoint_indices);
  const auto boundaries = s.packed && cu_seqlens->is_cpu() ? optional<Indices>(*cu_seqlens) : std::nullopt;
  auto used = slots_on_cpu(pool, s.N);
  for (int64_t n = 0; n < s.N; ++n) {
    if (offset[n] == 0 || index[n] <= pool.null_index) continue;
    const int64_t tokens = boundaries ? (*boundaries)[n + 1] - (*boundaries)[n] : s.T;
    TORCH_CHECK_VALUE(offset[n] > 0 && offset[n] % multiple == 0 && offset[n] <= tokens, op,
                      ": checkpoint_offsets: expected multiples of ", multiple, " up to the tokens of a sequence, got ",
                      offset[n], " for ", tokens, " tokens at ", n);
    TORCH_CHECK_VALUE(index[n] < pool.states.size(0), op,
                      ": checkpoint_indices: expected indices below the number of slots, got ", index[n], " for ",
                      pool.states.size(0), " slots");
    TORCH_CHECK_VALUE(used.insert(index[n]).second, op, ": checkpoint_indices: expected each slot at most once, got ",
                      index[n], " again at ", n);
  }
}

void check_accepted_counts(const char* op, const StatePool& pool, int64_t most) {
  if (!pool.num_accepted_tokens->is_cpu()) return;
  const Indices at(*pool.num_accepted_tokens);
  for (int64_t n = 0; n < at.size(); ++n) {
    TORCH_CHECK_VALUE(at[n] >= 1 && at[n] <= most, op, ": num_accepted_tokens: expected counts from 1 to ", most,
                      ", got ", at[n], " at ", n);
  }
}

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

std::vector<ByteRange> ByteRanges::read() const {
  const Indices from(source_offsets), to(destination_offsets), bytes(sizes);
  std::vector<ByteRange> ranges(from.size());
  for (int64_t n = 0; n < from.size(); ++n) ranges[n] = {from[n], to[n], bytes[n]};
  return ranges;
}

void check_ranges(const char* op, const ByteRanges& byte_ranges, int64_t bytes) {
  const auto ranges = byte_ranges.read();
  for (size_t n = 0; n < ranges.size(); ++n) {
    const auto& [source, destination, size] = ranges[n];
    TORCH_CHECK_VALUE(size >= 0, op, ": sizes: expected non-negative numbers of bytes, got ", size, " at ", n);
    check_inside(op, "source_offsets", source, size, n, bytes);
    check_inside(op, "destination_offsets", destination, size, n, bytes);
  }
  const auto written = written_by(op, ranges);
  for (size_t n = 0; n < ranges.size(); ++n) {
    const int64_t first = ranges[n].source, last = first + ranges[n].size;
    auto other = std::upper_bound(written.begin(), written.end(), first,
                                  [](int64_t byte, const Written& each) { return byte < each.last; });
    for (; other != written.end() && other->first < last; ++other) {
      if (other->n != int64_t(n)) refuse_overlap(op, other->n, int64_t(n));
    }
  }
}

}  // namespace torch_gdn
