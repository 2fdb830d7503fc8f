// Computes (I + A)^-1 for each chunk and head, for a strictly lower triangular A.
#pragma once
#include "ops/chunk_shape.h"
#include "ops/op.h"

namespace torch_gdn {

template <typename Int>
struct SolveTril {
  static constexpr const char* kSchema =
      "solve_tril(Tensor A, Tensor? cu_seqlens=None, Tensor? chunk_indices=None) -> Tensor";

  Tensor A;
  optional<Tensor> cu_seqlens, chunk_indices;

  ChunkShape<Int> shape;

  auto arguments() { return std::tie(A, cu_seqlens, chunk_indices); }

  void check(const char* op) {
    const Check<Int> check(op, "A", A);
    check.is_float32("A", A).dimensions(4, "[B, T, HV, chunk_size]");
    shape = {.B = size_of<Int>(A, 0), .T = size_of<Int>(A, 1), .HV = size_of<Int>(A, 2), .C = size_of<Int>(A, 3)};
    check_chunk_columns(check, "A", shape.C);
    check_sequences(check, shape, cu_seqlens, chunk_indices);
  }

  Tensor outputs() const { return empty(sizes_of<Int>(A), A.options()); }
};

}  // namespace torch_gdn
