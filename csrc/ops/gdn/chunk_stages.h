// The stages of a chunk.
#pragma once
#include "ops/chunk_shape.h"
#include "ops/gdn/gated_delta_rule.h"
#include "ops/op.h"

namespace torch_gdn {

// Computes the running sum of g within each chunk.
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

// Computes A for each chunk. It is the strictly lower triangle of beta k k^T, with the decays.
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

// Computes (I + A)^-1 for each chunk and head, for a strictly lower triangular A.
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

// Computes w and u: the keys and values of each chunk, multiplied by (I + A)^-1.
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

// Computes the state before each chunk, v_new, and the final state.
template <typename Int>
struct ChunkFwdH {
  static constexpr const char* kSchema =
      "chunk_fwd_h(Tensor k, Tensor w, Tensor u, Tensor g, Tensor? initial_state=None, "
      "bool output_final_state=False, int chunk_size=64, bool state_v_first=False, Tensor? cu_seqlens=None, "
      "Tensor? chunk_indices=None) -> (Tensor h, Tensor v_new, Tensor final_state)";

  Tensor k, w, u, g;
  optional<Tensor> initial_state;
  bool output_final_state;
  int64_t chunk_size;
  bool state_v_first;
  optional<Tensor> cu_seqlens, chunk_indices;

  ChunkShape<Int> shape;

  auto arguments() {
    return std::tie(k, w, u, g, initial_state, output_final_state, chunk_size, state_v_first, cu_seqlens,
                    chunk_indices);
  }

  void check(const char* op) {
    const Check<Int> check(op, "k", k);
    check.is_activation("k", k).dimensions(4, "[B, T, H, K]");
    check.same_dtype("w", w, "k", k);
    check.same_dtype("u", u, "k", k).dimensions(4, "[B, T, HV, V]");
    check_chunk_size(check, chunk_size);
    auto& s = shape = shape_of<Int>(check, "k", k, "u", u, chunk_size);
    check.shape("w", w, "[B, T, HV, K]", {s.B, s.T, s.HV, s.K});
    check.is_float32("g", g).shape("[B, T, HV]", {s.B, s.T, s.HV});
    check_sequences(check, s, cu_seqlens, chunk_indices);
    check_initial_state(check, s, initial_state, state_v_first);
  }

  std::tuple<Tensor, Tensor, Tensor> outputs() const {
    const auto& s = shape;
    return {empty<Int>(state_sizes({s.B, s.NT}, s, state_v_first), k.options()),
            empty<Int>({s.B, s.T, s.HV, s.V}, k.options()), final_state(s, k, output_final_state, state_v_first)};
  }
};

// Computes the output of each chunk from the state before it and its own tokens.
template <typename Int>
struct ChunkFwdO {
  static constexpr const char* kSchema =
      "chunk_fwd_o(Tensor q, Tensor k, Tensor v, Tensor h, Tensor g, float? scale=None, bool state_v_first=False, "
      "Tensor? cu_seqlens=None, int chunk_size=64, Tensor? chunk_indices=None) -> Tensor";

  Tensor q, k, v, h, g;
  optional<double> scale;
  bool state_v_first;
  optional<Tensor> cu_seqlens;
  int64_t chunk_size;
  optional<Tensor> chunk_indices;

  ChunkShape<Int> shape;

  auto arguments() { return std::tie(q, k, v, h, g, scale, state_v_first, cu_seqlens, chunk_size, chunk_indices); }

  void check(const char* op) {
    const Check<Int> check(op, "q", q);
    check.is_activation("q", q).dimensions(4, "[B, T, H, K]");
    check.same_dtype("k", k, "q", q);
    check.same_dtype("v", v, "q", q).dimensions(4, "[B, T, HV, V]");
    check.same_dtype("h", h, "q", q);
    check_chunk_size(check, chunk_size);
    auto& s = shape = shape_of<Int>(check, "q", q, "v", v, chunk_size);
    check.shape("k", k, "[B, T, H, K]", {s.B, s.T, s.H, s.K});
    check.is_float32("g", g).shape("[B, T, HV]", {s.B, s.T, s.HV});
    check_sequences(check, s, cu_seqlens, chunk_indices);
    check.shape("h", h, state_v_first ? "[B, NT, HV, V, K]" : "[B, NT, HV, K, V]",
                state_sizes({s.B, s.NT}, s, state_v_first));
  }

  Tensor outputs() const { return empty<Int>({shape.B, shape.T, shape.HV, shape.V}, q.options()); }
};

}  // namespace torch_gdn
