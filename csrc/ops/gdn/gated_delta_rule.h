// The inputs, options and states of the end-to-end ops.
#pragma once
#include <c10/util/SmallVector.h>

#include "ops/chunk_shape.h"
#include "ops/gates.h"
#include "ops/op.h"
#include "ops/slots.h"

namespace torch_gdn {

// Checkpoint offsets are multiples of this number, because a chunk of every algorithm ends there.
constexpr int64_t kCheckpointMultiple = 64;

// Log decays of each channel of K and of V, in addition to g.
struct ChannelDecays {
  optional<Tensor> gk, gv;
  const char* gk_name = "gk";    // the name of gk in the op
  ChannelGateOptions gate = {};  // how gk is computed from the argument
};

// A state is [rows.., HV, K, V], or [rows.., HV, V, K] if v_first.
template <typename Int>
c10::SmallVector<Int, 5> state_sizes(std::initializer_list<Int> rows, const ChunkShape<Int>& s, bool v_first) {
  c10::SmallVector<Int, 5> sizes(rows);
  sizes.append({s.HV, v_first ? s.V : s.K, v_first ? s.K : s.V});
  return sizes;
}

template <typename Int>
void check_initial_state(const Check<Int>& check, const ChunkShape<Int>& s, const optional<Tensor>& state, bool v_first,
                         const char* argument = "initial_state") {
  if (!state.has_value()) return;
  check.shape(argument, *state, v_first ? "[N, HV, V, K]" : "[N, HV, K, V]", state_sizes({s.N}, s, v_first));
  check.is_floating(argument, *state);
}

// Returns a float32 state, or an empty tensor if it was not requested.
template <typename Int>
Tensor final_state(const ChunkShape<Int>& s, const Tensor& like, bool wanted, bool v_first) {
  const auto options = like.options().dtype(at::kFloat);
  return empty_if<Int>(wanted, state_sizes({s.N}, s, v_first), options);
}

template <typename Int = int64_t>
struct GatedDeltaRule {
  Tensor q, k, v;
  optional<Tensor> g, beta;
  ChannelDecays channels;
  optional<double> scale;
  bool use_qk_l2norm;
  bool state_v_first;
  optional<Tensor> cu_seqlens;
  GateOptions gates;
  optional<at::ScalarType> output_dtype;
  std::string_view head_grouping;
  optional<Tensor> out;  // only in the in-place forms: the caller's tensor for o

  ChunkShape<Int> shape;

  // The arguments of the ops, in parts. In Kimi Delta Attention, g is gk, and its gate has a lower bound.
  auto inputs() { return std::tie(q, k, v, required(g), required(beta)); }
  auto kda_inputs() {
    channels.gk_name = "g";
    return std::tie(q, k, v, required(channels.gk), required(beta));
  }
  auto kda_gates() {
    auto& gate = channels.gate;
    return std::tie(gate.use_gate, gate.A_log, gate.dt_bias, gate.lower_bound, gates.use_beta_sigmoid,
                    gates.allow_neg_eigval);
  }
  auto output_options() { return std::tie(output_dtype, head_grouping); }

  // Checks all inputs except the shape of beta, the states and the sequences.
  void check_inputs(const Check<Int>& check) {
    check.is_activation("q", q).dimensions(4, "[B, T, H, K]");
    check.same_dtype("k", k, "q", q);
    check.is_activation("v", v).dimensions(4, "[B, T, HV, V]");
    auto& s = shape = shape_of<Int>(check, "q", q, "v", v, shape.C);
    check.shape("k", k, "[B, T, H, K]", {s.B, s.T, s.H, s.K});
    if (g.has_value()) check.is_floating("g", *g).shape("[B, T, HV]", {s.B, s.T, s.HV});
    const auto& [gk, gv, gk_name, gate] = channels;
    if (gk.has_value()) check.is_floating(gk_name, *gk).shape("[B, T, HV, K]", {s.B, s.T, s.HV, s.K});
    if (gv.has_value()) check.is_floating("gv", *gv).shape("[B, T, HV, V]", {s.B, s.T, s.HV, s.V});
    check_channel_gate_in_kernel(check, s, gate);
    if (beta.has_value()) check.is_floating("beta", *beta);
    check_gates(check, s.HV, g, beta, gates);
    check.value(dtype_of_output() == v.scalar_type() || dtype_of_output() == at::kFloat, "output_dtype",
                "float32 or the dtype of v", dtype_name(dtype_of_output()));
    check.value(head_grouping == "block" || head_grouping == "tiled", "head_grouping", "'block' or 'tiled'", "'",
                head_grouping, "'");
    s.tiled = head_grouping == "tiled";
    if (out.has_value()) check.is_output("out", *out, "[B, T, HV, V]", {s.B, s.T, s.HV, s.V}, dtype_of_output());
  }

  void check_pool(const Check<Int>& check, const StatePool& pool, bool slot_per_token = false) const {
    const char* pattern = state_v_first ? "[slots, HV, V, K]" : "[slots, HV, K, V]";
    check.is_activation("state_pool", pool.states).dimensions(4, pattern);
    check.shape("state_pool", pool.states, pattern, state_sizes({size_of<Int>(pool.states, 0)}, shape, state_v_first));
    check_slots(check, shape.N, pool, slot_per_token);
  }

  at::ScalarType dtype_of_output() const { return output_dtype.value_or(v.scalar_type()); }

  Tensor output() const {
    return empty_if<Int>(!out.has_value(), {shape.B, shape.T, shape.HV, shape.V}, q.options().dtype(dtype_of_output()));
  }
};

// The form of a rule that takes and returns states.
template <typename Rule, typename Int>
struct WithStates : Rule {
  optional<Tensor> initial_state;
  bool output_final_state;

  auto options() {
    return std::tie(this->scale, initial_state, output_final_state, this->use_qk_l2norm, this->state_v_first,
                    this->cu_seqlens);
  }

  void check(const char* op) {
    const Check<Int> check(op, "q", this->q);
    this->check_rule(check);
    check_initial_state(check, this->shape, initial_state, this->state_v_first);
  }

  Tensor new_state() const { return final_state(this->shape, this->q, output_final_state, this->state_v_first); }
};

// The form that updates a pool of states in place.
template <typename Rule, typename Int>
struct WithPool : Rule {
  StatePool pool;

  auto options() { return std::tie(this->scale, this->use_qk_l2norm, this->state_v_first, this->cu_seqlens); }

  void check(const char* op) {
    const Check<Int> check(op, "q", this->q);
    this->check_rule(check);
    this->check_states(check, pool);
  }
};

}  // namespace torch_gdn
