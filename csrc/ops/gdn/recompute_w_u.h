// Computes w and u: the keys and values of each chunk, multiplied by (I + A)^-1.
#pragma once
#include "ops/chunk_shape.h"
#include "ops/op.h"

namespace torch_gdn {

template <typename Int>
struct RecomputeWU {
  static constexpr const char* kSchema =
      "recompute_w_u(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor g, Tensor? cu_seqlens=None, "
      "Tensor? chunk_indices=None) -> (Tensor w, Tensor u)";

  Tensor k, v, beta, A, g;
  optional<Tensor> cu_seqlens, chunk_indices;

  ChunkShape<Int> shape;

  auto arguments() { return std::tie(k, v, beta, A, g, cu_seqlens, chunk_indices); }

  void check(const char* op) {
    const Check<Int> check(op, "k", k);
    check.is_activation("k", k).dimensions(4, "[B, T, H, K]");
    check.same_dtype("v", v, "k", k).dimensions(4, "[B, T, HV, V]");
    check.is_float32("A", A).dimensions(4, "[B, T, HV, chunk_size]");
    check_chunk_columns(check, "A", size_of<Int>(A, 3));
    auto& s = shape = shape_of<Int>(check, "k", k, "v", v, size_of<Int>(A, 3));
    check.shape("v", v, "[B, T, HV, V]", {s.B, s.T, s.HV, s.V});
    check.is_floating("beta", beta).shape("[B, T, HV]", {s.B, s.T, s.HV});
    check.shape("A", A, "[B, T, HV, chunk_size]", {s.B, s.T, s.HV, s.C});
    check.is_float32("g", g).shape("[B, T, HV]", {s.B, s.T, s.HV});
    check_sequences(check, s, cu_seqlens, chunk_indices);
  }

  std::tuple<Tensor, Tensor> outputs() const {
    const auto& s = shape;
    return {empty<Int>({s.B, s.T, s.HV, s.K}, k.options()), empty<Int>({s.B, s.T, s.HV, s.V}, k.options())};
  }
};

}  // namespace torch_gdn
