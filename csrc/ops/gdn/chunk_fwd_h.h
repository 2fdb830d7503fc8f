// Computes the state before each chunk, v_new, and the final state.
#pragma once
#include "ops/gdn/gated_delta_rule.h"

namespace torch_gdn {

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
    check.shape("u", u, "[B, T, HV, V]", {s.B, s.T, s.HV, s.V});
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

}  // namespace torch_gdn
