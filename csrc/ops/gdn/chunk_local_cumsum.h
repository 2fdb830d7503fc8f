// Computes the running sum of g within each chunk.
#pragma once
#include "ops/chunk_shape.h"
#include "ops/op.h"

namespace torch_gdn {

template <typename Int>
struct ChunkLocalCumsum {
  static constexpr const char* kSchema =
      "chunk_local_cumsum(Tensor g, int chunk_size=64, Tensor? cu_seqlens=None, Tensor? chunk_indices=None) -> Tensor";

  Tensor g;
  int64_t chunk_size;
  optional<Tensor> cu_seqlens, chunk_indices;

  ChunkShape<Int> shape;

  auto arguments() { return std::tie(g, chunk_size, cu_seqlens, chunk_indices); }

  void check(const char* op) {
    const Check<Int> check(op, "g", g);
    check.is_floating("g", g).dimensions(3, "[B, T, HV]");
    check_chunk_size(check, chunk_size);
    shape = {.B = size_of<Int>(g, 0), .T = size_of<Int>(g, 1), .HV = size_of<Int>(g, 2), .C = chunk_size};
    check_sequences(check, shape, cu_seqlens, chunk_indices);
  }

  Tensor outputs() const { return empty(sizes_of<Int>(g), g.options().dtype(at::kFloat)); }
};

}  // namespace torch_gdn
