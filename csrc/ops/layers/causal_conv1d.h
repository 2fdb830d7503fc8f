// A causal convolution of each channel along T, and its in-place form on a pool of states. A state holds the last S >=
// W - 1 tokens.
#pragma once
#include <string_view>

#include "ops/chunk_shape.h"
#include "ops/op.h"
#include "ops/slots.h"

namespace torch_gdn {

template <typename Int>
struct CausalConvolution {
  Tensor x, weight;
  optional<Tensor> bias, residual;  // the residual is added last, before y is rounded
  optional<std::string_view> activation;
  optional<Tensor> cu_seqlens;
  optional<Tensor> out;  // only in the in-place form: the caller's tensor for y

  ChunkShape<Int> shape;    // B, T, N
  Int D = 0, W = 0, S = 0;  // S is the number of columns of a state

  bool has_silu() const { return activation.has_value(); }

  void check_inputs(const Check<Int>& check) {
    check.is_activation("x", x).dimensions(3, "[B, T, D]");
    check.is_activation("weight", weight).dimensions(2, "[D, W]");
    shape.B = size_of<Int>(x, 0), shape.T = size_of<Int>(x, 1);
    D = size_of<Int>(x, 2), W = size_of<Int>(weight, 1);
    check.shape("weight", weight, "[D, W]", {D, W});
    check.in_range("weight", "W from 2 to 4", W, 2, 4);
    if (bias.has_value()) check.same_dtype("bias", *bias, "weight", weight).shape("[D]", {D});
    if (residual.has_value()) check.like("residual", *residual, "x", x);
    check.value(!activation.has_value() || *activation == "silu" || *activation == "swish", "activation",
                "None, 'silu' or 'swish'", "'", activation.value_or(""), "'");
    check_sequences(check, shape, cu_seqlens);
    if (out.has_value()) check.is_output("out", *out, "[B, T, D]", {shape.B, shape.T, D}, x.scalar_type());
  }

  // Checks a state [N or slots, D, S]. It gives S.
  void check_state(const Check<Int>& check, const char* argument, const Tensor& state, const char* pattern,
                   const Int& states) {
    S = size_of<Int>(state, 2);
    check.shape(argument, state, pattern, {states, D, S});
    check.is_activation(argument, state);
    check.value(sym_ge(S, W - 1), argument, "a width of at least W - 1", S, " for W = ", W);
  }

  void check_seq_idx(const Check<Int>& check, const Tensor& seq_idx, bool no_states, const char* expected) const {
    check.is_index("seq_idx", seq_idx);
    check.value(seq_idx.device() == x.device(), "seq_idx", "a tensor on the device of x", "one on ", seq_idx.device());
    check.shape("seq_idx", seq_idx, "[B, T]", {shape.B, shape.T});
    check.value(no_states && !cu_seqlens.has_value(), "seq_idx", expected, "a tensor");
  }

  Tensor output() const { return empty_if<Int>(!out.has_value(), {shape.B, shape.T, D}, x.options()); }
};

template <typename Int>
struct CausalConv1d : CausalConvolution<Int> {
  static constexpr const char* kSchema =
      "causal_conv1d(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None, Tensor? initial_state=None, "
      "bool output_final_state=False, int? state_width=None, str? activation=None, Tensor? cu_seqlens=None, "
      "Tensor? seq_idx=None) -> (Tensor y, Tensor final_state)";

  optional<Tensor> initial_state;
  bool output_final_state;
  optional<int64_t> state_width;
  optional<Tensor> seq_idx;

  auto arguments() {
    return std::tie(this->x, this->weight, this->bias, this->residual, initial_state, output_final_state, state_width,
                    this->activation, this->cu_seqlens, seq_idx);
  }

  void check(const char* op) {
    const Check<Int> check(op, "x", this->x);
    this->check_inputs(check);
    this->S = state_width.has_value() ? Int(*state_width) : this->W;
    if (initial_state.has_value()) {
      check.dimensions("initial_state", *initial_state, 3, "[N, D, S]");
      this->check_state(check, "initial_state", *initial_state, "[N, D, S]", this->shape.N);
    }
    const Int width = state_width.has_value() ? Int(*state_width) : this->S;
    const char* expected = "the width of initial_state, at least W - 1";
    check.value(sym_eq(width, this->S), "state_width", expected, width, " for W = ", this->W);
    check.value(sym_ge(width, this->W - 1), "state_width", expected, width, " for W = ", this->W);
    if (!seq_idx.has_value()) return;
    this->check_seq_idx(check, *seq_idx, !initial_state.has_value() && !output_final_state,
                        "None with cu_seqlens, initial_state or output_final_state");
  }

  std::tuple<Tensor, Tensor> outputs() const {
    return {this->output(), empty_if<Int>(output_final_state, {this->shape.N, this->D, this->S},
                                          initial_state.value_or(this->x).options())};
  }
};

template <typename Int>
struct CausalConv1dUpdate : CausalConvolution<Int> {
  static constexpr const char* kSchema =
      "causal_conv1d_update_(Tensor x, Tensor weight, Tensor(a!) state_pool, Tensor? state_indices=None, "
      "Tensor? has_initial_state=None, int null_index=-1, Tensor? bias=None, str? activation=None, "
      "Tensor? cu_seqlens=None, Tensor? num_accepted_tokens=None, Tensor? checkpoint_offsets=None, "
      "Tensor? checkpoint_indices=None, Tensor(b!)? out=None, Tensor? residual=None) -> Tensor y";

  StatePool pool;

  auto arguments() {
    return std::tie(this->x, this->weight, pool.states, pool.indices, pool.has_initial_state, pool.null_index,
                    this->bias, this->activation, this->cu_seqlens, pool.num_accepted_tokens, pool.checkpoint_offsets,
                    pool.checkpoint_indices, this->out, this->residual);
  }

  void check(const char* op) {
    const Check<Int> check(op, "x", this->x);
    this->check_inputs(check);
    check.dimensions("state_pool", pool.states, 3, "[slots, D, S]");
    this->check_state(check, "state_pool", pool.states, "[slots, D, S]", size_of<Int>(pool.states, 0));
    check_slots(check, this->shape.N, pool);
    check_checkpoints(check, pool, this->shape, this->cu_seqlens, 1);
    if (!pool.num_accepted_tokens.has_value()) return;
    check.value(!pool.checkpoint_offsets.has_value(), "checkpoint_offsets", "None with num_accepted_tokens",
                "a tensor");
    const Int tokens = this->S - (this->W - 2);
    check_tokens_of_sequences(check, "state_pool", "W - 2 columns plus one per token of a sequence", this->shape,
                              this->cu_seqlens, tokens);
    check_num_accepted_tokens(check, this->shape.N, pool, tokens);
  }

  Tensor outputs() const { return this->output(); }
};

// The gradients of causal_conv1d. The residual's is dy itself.
template <typename Int>
struct CausalConv1dBwd : CausalConvolution<Int> {
  static constexpr const char* kSchema =
      "causal_conv1d_bwd(Tensor dy, Tensor x, Tensor weight, Tensor? bias=None, Tensor? initial_state=None, "
      "Tensor? dfinal_state=None, str? activation=None, Tensor? cu_seqlens=None, Tensor? seq_idx=None, "
      "bool output_dweight=True) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_state)";

  Tensor dy;
  optional<Tensor> initial_state, dfinal_state, seq_idx;
  bool output_dweight;

  auto arguments() {
    return std::tie(dy, this->x, this->weight, this->bias, initial_state, dfinal_state, this->activation,
                    this->cu_seqlens, seq_idx, output_dweight);
  }

  void check(const char* op) {
    const Check<Int> check(op, "dy", dy);
    check.is_activation("dy", dy).dimensions(3, "[B, T, D]");
    this->check_inputs(check);
    check.like("x", this->x, "dy", dy);
    for (const auto& [name, state] : {std::pair{"initial_state", &initial_state}, {"dfinal_state", &dfinal_state}}) {
      if (!state->has_value()) continue;
      check.dimensions(name, **state, 3, "[N, D, S]");
      this->check_state(check, name, **state, "[N, D, S]", this->shape.N);
    }
    if (initial_state.has_value() && dfinal_state.has_value()) {
      check.like("dfinal_state", *dfinal_state, "initial_state", *initial_state);
    }
    if (!seq_idx.has_value()) return;
    this->check_seq_idx(check, *seq_idx, !initial_state.has_value() && !dfinal_state.has_value(),
                        "None with cu_seqlens, initial_state or dfinal_state");
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor> outputs() const {
    const auto options = this->weight.options();
    return {empty<Int>({this->shape.B, this->shape.T, this->D}, this->x.options()),
            empty_if<Int>(output_dweight, {this->D, this->W}, options),
            empty_if<Int>(output_dweight && this->bias.has_value(), {this->D}, options),
            empty_if<Int>(initial_state.has_value(), {this->shape.N, this->D, this->S},
                          initial_state.value_or(this->x).options())};
  }
};

}  // namespace torch_gdn
