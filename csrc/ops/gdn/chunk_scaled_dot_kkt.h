// Computes A for each chunk. It is the strictly lower triangle of beta k k^T, with the decays.
#pragma once
#include "ops/chunk_shape.h"
#include "ops/op.h"

namespace torch_gdn {

template <typename Int>
struct ChunkScaledDotKkt {
  static constexpr const char* kSchema =
      "chunk_scaled_dot_kkt(Tensor k, Tensor g, Tensor beta, Tensor? cu_seqlens=None, int chunk_size=64, "
      "Tensor? chunk_indices=None) -> Tensor";

  Tensor k, g, beta;
  optional<Tensor> cu_seqlens;
  int64_t chunk_size;
  optional<Tensor> chunk_indices;

  ChunkShape<Int> shape;

  auto arguments() { return std::tie(k, g, beta, cu_seqlens, chunk_size, chunk_indices); }

  void check(const char* op) {
    const Check<Int> check(op, "k", k);
    check.is_activation("k", k).dimensions(4, "[B, T, H, K]");
    check.is_float32("g", g).dimensions(3, "[B, T, HV]");
    check_chunk_size(check, chunk_size);
    auto& s = shape;
    s = {.B = size_of<Int>(k, 0), .T = size_of<Int>(k, 1), .H = size_of<Int>(k, 2), .HV = size_of<Int>(g, 2)};
    s.K = size_of<Int>(k, 3);
    s.C = chunk_size;
    check_key_size(check, "k", s.K);
    check_heads(check, "k", s.H, "g", s.HV);
    check.shape("g", g, "[B, T, HV]", {s.B, s.T, s.HV});
    check.is_floating("beta", beta).shape("[B, T, HV]", {s.B, s.T, s.HV});
    check_sequences(check, s, cu_seqlens, chunk_indices);
  }

  Tensor outputs() const { return empty<Int>({shape.B, shape.T, shape.HV, shape.C}, k.options().dtype(at::kFloat)); }
};

}  // namespace torch_gdn
