// The end-to-end decode op, and its in-place form on a pool of states. beta is [B, T, HV] or [B, T, HV, V], or None,
// which means 1. Without g there is no decay.
#pragma once
#include "ops/gdn/gated_delta_rule.h"

namespace torch_gdn {

template <typename Int>
struct RecurrentRule : GatedDeltaRule<Int> {
  auto decays() { return std::tie(this->channels.gk, this->channels.gv); }

  void check_rule(const Check<Int>& check) {
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
  void check_states(const Check<Int>& check, const StatePool& pool) const {
    this->check_pool(check, pool, true);
    const auto columns = check_columns_of_slots(check, pool, this->shape, this->cu_seqlens);
    if (columns.has_value()) check_num_accepted_tokens(check, this->shape.N, pool, *columns);
  }
};

template <typename Int>
struct RecurrentCall : WithStates<RecurrentRule<Int>, Int> {
  using Shared = RecurrentCall;

  std::tuple<Tensor, Tensor> outputs() const { return {this->output(), this->new_state()}; }
};

template <typename Int>
struct RecurrentCallInPlace : WithPool<RecurrentRule<Int>, Int> {
  using Shared = RecurrentCallInPlace;

  auto results() { return std::tie(this->pool.num_accepted_tokens, this->out); }

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
    return std::tuple_cat(std::tie(this->q, this->k, this->v, this->g, this->beta), this->options(), this->decays(),
                          this->gates.arguments(), this->output_options());
  }
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
    return std::tuple_cat(std::tie(this->q, this->k, this->v, this->g, this->beta), this->pool.slots(), this->options(),
                          this->decays(), this->gates.arguments(), this->output_options(), this->results());
  }
};

}  // namespace torch_gdn
