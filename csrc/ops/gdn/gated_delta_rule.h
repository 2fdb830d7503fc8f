// What both end-to-end ops accept. Their arguments are many, so those that go together travel together.
#pragma once
#include <string_view>

#include "ops/slots.h"

namespace torch_gdn {

// How g and beta become log decay and step: g = -exp(A_log) softplus(g + dt_bias), beta = sigmoid(beta) or twice that.
struct GateOptions {
  bool use_gate = false;
  optional<Tensor> A_log, dt_bias;  // read where use_gate is set
  bool use_sigmoid = false;
  bool allow_neg_eigval = false;
};

struct Channels {
  optional<Tensor> gk, gv;
};

// States of a server's sequences, updated in place.
struct Pool {
  const Tensor& states;  // [slots, HV, K, V], or [slots, HV, V, K]
  const optional<Tensor>&indices, &has_state;
  int64_t null_index;
  bool v_first;
};

struct EndToEndOp {
  const char* name;
  const Tensor &q, &k, &v;
  const optional<Tensor>&g, &beta;
  const GateOptions& gates;
  optional<at::ScalarType> output_dtype;
  std::string_view head_grouping;
};

inline at::ScalarType output_dtype_of(const EndToEndOp& op) { return op.output_dtype.value_or(op.q.scalar_type()); }

namespace detail {

inline void check_gates(const Check& check, const ChunkShape& s, const EndToEndOp& op) {
  const auto& [use_gate, A_log, dt_bias, use_sigmoid, allow_neg_eigval] = op.gates;
  check.value(!use_gate || op.g.has_value(), "g", "a tensor where use_gate_in_kernel is set", "None");
  check.value(!use_gate || A_log.has_value(), "A_log", "a tensor where use_gate_in_kernel is set", "None");
  check.value(!use_sigmoid || op.beta.has_value(), "beta", "a tensor where use_beta_sigmoid_in_kernel is set", "None");
  check.value(!allow_neg_eigval || use_sigmoid, "allow_neg_eigval", "False where use_beta_sigmoid_in_kernel is False",
              "True");
  if (!use_gate) return;
  check.is_floating("A_log", *A_log);
  check.shape("A_log", *A_log, "[HV]", {s.HV});
  if (!dt_bias.has_value()) return;
  check.is_floating("dt_bias", *dt_bias);
  check.shape("dt_bias", *dt_bias, "[HV]", {s.HV});
}

inline void check_output(const Check& check, const EndToEndOp& op) {
  const auto dtype = output_dtype_of(op);
  check.value(dtype == op.q.scalar_type() || dtype == at::kFloat, "output_dtype", "float32 or the dtype of q", dtype);
  check.value(op.head_grouping == "block" || op.head_grouping == "tiled", "head_grouping", "'block' or 'tiled'", "'",
              op.head_grouping, "'");
}

// Fills all but what sequences() fills.
inline ChunkShape check_inputs(const Check& check, const EndToEndOp& op) {
  const auto& [name, q, k, v, g, beta, gates, output_dtype, head_grouping] = op;
  check.is_activation("q", q);
  check.dimensions("q", q, 4, "[B, T, H, K]");
  check.same_dtype("k", k, q);
  check.same_dtype("v", v, q);
  check.dimensions("v", v, 4, "[B, T, HV, V]");
  ChunkShape s{.B = q.size(0), .T = q.size(1), .H = q.size(2), .HV = v.size(2), .K = q.size(3), .V = v.size(3)};
  check.key_size("q", s.K);
  check.value_size("v", s.V);
  check.heads("q", s.H, "v", s.HV);
  check.shape("k", k, "[B, T, H, K]", {s.B, s.T, s.H, s.K});
  check.shape("v", v, "[B, T, HV, V]", {s.B, s.T, s.HV, s.V});
  if (g.has_value()) {
    check.is_floating("g", *g);
    check.shape("g", *g, "[B, T, HV]", {s.B, s.T, s.HV});
  }
  if (beta.has_value()) check.is_floating("beta", *beta);
  check_gates(check, s, op);
  check_output(check, op);
  s.tiled = head_grouping == "tiled";
  return s;
}

inline void check_channels(const Check& check, const ChunkShape& s, const Channels& channels) {
  if (channels.gk.has_value()) {
    check.is_floating("gk", *channels.gk);
    check.shape("gk", *channels.gk, "[B, T, HV, K]", {s.B, s.T, s.HV, s.K});
  }
  if (channels.gv.has_value()) {
    check.is_floating("gv", *channels.gv);
    check.shape("gv", *channels.gv, "[B, T, HV, V]", {s.B, s.T, s.HV, s.V});
  }
}

inline void check_pool(const Check& check, const ChunkShape& s, const Pool& pool) {
  const char* pattern = pool.v_first ? "[slots, HV, V, K]" : "[slots, HV, K, V]";
  check.is_activation("state_pool", pool.states);
  check.dimensions("state_pool", pool.states, 4, pattern);
  check.shape("state_pool", pool.states, pattern,
              {pool.states.size(0), s.HV, pool.v_first ? s.V : s.K, pool.v_first ? s.K : s.V});
  check_slots(check, s.N, pool.states, pool.indices, pool.has_state, pool.null_index);
}

// All but the states.
inline ChunkShape check_chunked(const Check& check, const EndToEndOp& op, const optional<Tensor>& cu_seqlens,
                                const optional<Tensor>& chunk_indices, int64_t chunk_size) {
  check.chunk_size(chunk_size);
  auto s = check_inputs(check, op);
  s.C = chunk_size;
  check.shape("beta", *op.beta, "[B, T, HV]", {s.B, s.T, s.HV});
  check.sequences(s, cu_seqlens, chunk_indices);
  return s;
}

inline ChunkShape check_recurrent(const Check& check, const EndToEndOp& op, const Channels& channels,
                                  const optional<Tensor>& cu_seqlens) {
  auto s = check_inputs(check, op);
  if (op.beta.has_value() && op.beta->dim() == 4) {
    check.shape("beta", *op.beta, "[B, T, HV, V]", {s.B, s.T, s.HV, s.V});
  } else if (op.beta.has_value()) {
    check.shape("beta", *op.beta, "[B, T, HV]", {s.B, s.T, s.HV});
  }
  check_channels(check, s, channels);
  check.sequences(s, cu_seqlens, std::nullopt);
  return s;
}

}  // namespace detail

inline ChunkShape check_chunk_gated_delta_rule(const EndToEndOp& op, const optional<Tensor>& initial_state,
                                               bool state_v_first, const optional<Tensor>& cu_seqlens,
                                               const optional<Tensor>& chunk_indices, int64_t chunk_size) {
  const Check check(op.name, "q", op.q);
  const auto s = detail::check_chunked(check, op, cu_seqlens, chunk_indices, chunk_size);
  check.initial_state(s, initial_state, state_v_first);
  return s;
}

inline ChunkShape check_chunk_gated_delta_rule_(const EndToEndOp& op, const Pool& pool,
                                                const optional<Tensor>& cu_seqlens,
                                                const optional<Tensor>& chunk_indices, int64_t chunk_size) {
  const Check check(op.name, "q", op.q);
  const auto s = detail::check_chunked(check, op, cu_seqlens, chunk_indices, chunk_size);
  detail::check_pool(check, s, pool);
  return s;
}

inline ChunkShape check_fused_recurrent_gated_delta_rule(const EndToEndOp& op, const Channels& channels,
                                                         const optional<Tensor>& initial_state, bool state_v_first,
                                                         const optional<Tensor>& cu_seqlens) {
  const Check check(op.name, "q", op.q);
  const auto s = detail::check_recurrent(check, op, channels, cu_seqlens);
  check.initial_state(s, initial_state, state_v_first);
  return s;
}

inline ChunkShape check_fused_recurrent_gated_delta_rule_(const EndToEndOp& op, const Channels& channels,
                                                          const Pool& pool, const optional<Tensor>& cu_seqlens) {
  const Check check(op.name, "q", op.q);
  const auto s = detail::check_recurrent(check, op, channels, cu_seqlens);
  detail::check_pool(check, s, pool);
  return s;
}

}  // namespace torch_gdn
