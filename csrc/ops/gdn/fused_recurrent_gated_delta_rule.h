// The end-to-end decode op, and its in-place form on a pool of states. beta is [B, T, HV] or [B, T, HV, V], and counts
// as 1 if None. Without g there is no decay.
#pragma once
#include "ops/gdn/gated_delta_rule.h"

namespace torch_gdn {

template <typename Int>
struct RecurrentRule : GatedDeltaRule<Int> {
  void check_recurrent(const Check<Int>& check) {
    this->check_inputs(check);
    auto& s = this->shape;
    if (this->beta.has_value() && this->beta->dim() == 4) {
      check.shape("beta", *this->beta, "[B, T, HV, V]", {s.B, s.T, s.HV, s.V});
    } else if (this->beta.has_value()) {
      check.shape("beta", *this->beta, "[B, T, HV]", {s.B, s.T, s.HV});
    }
    check_sequences(check, s, this->cu_seqlens);
  }

  // There is one slot per sequence, or one per token.
  void check_token_pool(const Check<Int>& check, const StatePool& pool) const {
    this->check_pool(check, pool, true);
    if (!pool.has_slot_per_token()) {
      check.value(!pool.num_accepted_tokens.has_value(), "num_accepted_tokens",
                  "None when state_indices is not [N, tokens]", "a tensor");
      return;
    }
    const Int columns = size_of<Int>(*pool.indices, 1);
    check.value(sym_ge(columns, Int(1)), "state_indices", "at least one column", columns);
    check_tokens_of_sequences(check, "state_indices", "a column for each token of a sequence", this->shape,
                              this->cu_seqlens, columns);
    check_num_accepted_tokens(check, this->shape.N, pool, columns);
  }
};

// The form that takes and returns states.
template <typename Int>
struct RecurrentCall : RecurrentRule<Int> {
  optional<Tensor> initial_state;
  bool output_final_state;

  void check_as(const char* op) {
    const Check<Int> check(op, "q", this->q);
    this->check_recurrent(check);
    check_initial_state(check, this->shape, initial_state, this->state_v_first);
  }

  std::tuple<Tensor, Tensor> outputs() const {
    return {this->output(), final_state(this->shape, this->q, output_final_state, this->state_v_first)};
  }
};

// The form that updates a pool of states in place.
template <typename Int>
struct RecurrentCallInPlace : RecurrentRule<Int> {
  StatePool pool;

  void check_as(const char* op) {
    const Check<Int> check(op, "q", this->q);
    this->check_recurrent(check);
    this->check_token_pool(check, pool);
  }

  Tensor outputs() const { return this->output(); }
};

template <typename Int>
struct FusedRecurrentGatedDeltaRule : RecurrentCall<Int> {
  static constexpr const char* kSchema =
      "fused_recurrent_gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor? g=None, Tensor? beta=None, "
      "float? scale=None, Tensor? initial_state=None, bool output_final_state=False, "
      "bool use_qk_l2norm_in_kernel=False, bool state_v_first=False, Tensor? cu_seqlens=None, Tensor? gk=None, "
      "Tensor? gv=None, bool use_gate_in_kernel=False, Tensor? A_log=None, Tensor? dt_bias=None, "
      "bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, ScalarType? output_dtype=None, "
      "str head_grouping='block') -> (Tensor o, Tensor final_state)";

  auto arguments() {
    return std::tie(this->q, this->k, this->v, this->g, this->beta, this->scale, this->initial_state,
                    this->output_final_state, this->use_qk_l2norm, this->state_v_first, this->cu_seqlens,
                    this->channels.gk, this->channels.gv, this->gates.use_gate, this->gates.A_log, this->gates.dt_bias,
                    this->gates.use_beta_sigmoid, this->gates.allow_neg_eigval, this->output_dtype,
                    this->head_grouping);
  }

  void check() { this->check_as("fused_recurrent_gated_delta_rule"); }
};

template <typename Int>
struct FusedRecurrentGatedDeltaRuleInPlace : RecurrentCallInPlace<Int> {
  static constexpr const char* kSchema =
      "fused_recurrent_gated_delta_rule_(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor(a!) state_pool, "
      "Tensor? state_indices=None, Tensor? has_initial_state=None, int null_index=-1, float? scale=None, "
      "bool use_qk_l2norm_in_kernel=False, bool state_v_first=False, Tensor? cu_seqlens=None, Tensor? gk=None, "
      "Tensor? gv=None, bool use_gate_in_kernel=False, Tensor? A_log=None, Tensor? dt_bias=None, "
      "bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, ScalarType? output_dtype=None, "
      "str head_grouping='block', Tensor? num_accepted_tokens=None, Tensor(b!)? out=None) -> Tensor o";

  auto arguments() {
    return std::tie(this->q, this->k, this->v, this->g, this->beta, this->pool.states, this->pool.indices,
                    this->pool.has_initial_state, this->pool.null_index, this->scale, this->use_qk_l2norm,
                    this->state_v_first, this->cu_seqlens, this->channels.gk, this->channels.gv, this->gates.use_gate,
                    this->gates.A_log, this->gates.dt_bias, this->gates.use_beta_sigmoid, this->gates.allow_neg_eigval,
                    this->output_dtype, this->head_grouping, this->pool.num_accepted_tokens, this->out);
  }

  void check() { this->check_as("fused_recurrent_gated_delta_rule_"); }
};

}  // namespace torch_gdn
