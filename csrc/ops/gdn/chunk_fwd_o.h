// Computes the output of each chunk from the state before it and its own tokens.
#pragma once
#include "ops/gdn/gated_delta_rule.h"

namespace torch_gdn {

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
    check.shape("v", v, "[B, T, HV, V]", {s.B, s.T, s.HV, s.V});
    check.is_float32("g", g).shape("[B, T, HV]", {s.B, s.T, s.HV});
    check_sequences(check, s, cu_seqlens, chunk_indices);
    check.shape("h", h, state_v_first ? "[B, NT, HV, V, K]" : "[B, NT, HV, K, V]",
                state_sizes({s.B, s.NT}, s, state_v_first));
  }

  Tensor outputs() const { return empty<Int>({shape.B, shape.T, shape.HV, shape.V}, q.options()); }
};

}  // namespace torch_gdn
