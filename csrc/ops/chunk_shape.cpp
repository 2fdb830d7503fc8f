#include "ops/chunk_shape.h"

#include "ops/indices.h"

namespace torch_gdn {

namespace {

void check_chunk_rows(const char* op, const ChunkShape<>& s, int64_t chunks) {
  TORCH_CHECK_VALUE(s.NT >= chunks, op, ": chunk_indices: expected ", chunks,
                    " rows, one for each chunk of cu_seqlens, got ", s.NT);
}

}  // namespace

void check_cu_seqlens(const char* op, const ChunkShape<>& s, const Tensor& cu_seqlens) {
  if (s.C > 0) check_chunk_rows(op, s, ceil_div(s.T, s.C));  // without rows, no kernel runs that could report this
  // Without sequences, no kernel runs that could report this either.
  TORCH_CHECK_VALUE(s.N > 0 || s.T == 0, op, ": cu_seqlens: expected shape [N + 1] with N >= 1 for ", s.T,
                    " tokens, got [1]");
  if (!cu_seqlens.is_cpu()) return;
  const Indices at(cu_seqlens);
  TORCH_CHECK_VALUE(at[0] == 0, op, ": cu_seqlens: expected the first boundary to be 0, got ", at[0]);
  TORCH_CHECK_VALUE(at[s.N] == s.T, op, ": cu_seqlens: expected the last boundary to be T = ", s.T, ", got ", at[s.N]);
  for (int64_t n = 0; n < s.N; ++n) {
    TORCH_CHECK_VALUE(at[n] <= at[n + 1], op, ": cu_seqlens: expected ascending boundaries, got ", at[n], " before ",
                      at[n + 1], " at index ", n);
  }
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

}  // namespace torch_gdn
