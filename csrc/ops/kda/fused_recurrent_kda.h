// Kimi Delta Attention token by token, for decoding, and its in-place form on a pool of states: the recurrent rule,
// whose decays of key channels are called g here.
#pragma once
#include "ops/gdn/fused_recurrent_gated_delta_rule.h"

namespace torch_gdn {

template <typename Int>
struct RecurrentKda : RecurrentRule<Int> {
  Tensor required_g, required_beta;  // optional in the recurrent rule

  void check_kda(const Check<Int>& check) {
    this->beta = required_beta;
    this->channels.gk = required_g;
    this->check_recurrent(check, "g");
    check_channel_gate_in_kernel(check, this->shape, this->channels.gate);
  }
};

template <typename Int>
struct FusedRecurrentKda : RecurrentKda<Int> {
  static constexpr const char* kSchema =
      "fused_recurrent_kda(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float? scale=None, "
      "Tensor? initial_state=None, bool output_final_state=False, bool use_qk_l2norm_in_kernel=False, "
      "bool state_v_first=False, Tensor? cu_seqlens=None, bool use_gate_in_kernel=False, Tensor? A_log=None, "
      "Tensor? dt_bias=None, float? lower_bound=None, bool use_beta_sigmoid_in_kernel=False, "
      "bool allow_neg_eigval=False, ScalarType? output_dtype=None, str head_grouping='block') -> "
      "(Tensor o, Tensor final_state)";

  optional<Tensor> initial_state;
  bool output_final_state;

  auto arguments() {
    auto& gate = this->channels.gate;
    return std::tie(this->q, this->k, this->v, this->required_g, this->required_beta, this->scale, initial_state,
                    output_final_state, this->use_qk_l2norm, this->state_v_first, this->cu_seqlens, gate.use_gate,
                    gate.A_log, gate.dt_bias, gate.lower_bound, this->gates.use_beta_sigmoid,
                    this->gates.allow_neg_eigval, this->output_dtype, this->head_grouping);
  }

  void check() {
    const Check<Int> check("fused_recurrent_kda", "q", this->q);
    this->check_kda(check);
    check_initial_state(check, this->shape, initial_state, this->state_v_first);
  }

  std::tuple<Tensor, Tensor> outputs() const {
    return {this->output(), final_state(this->shape, this->q, output_final_state, this->state_v_first)};
  }
};

template <typename Int>
struct FusedRecurrentKdaInPlace : RecurrentKda<Int> {
  static constexpr const char* kSchema =
      "fused_recurrent_kda_(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state_pool, "
      "Tensor? state_indices=None, Tensor? has_initial_state=None, int null_index=-1, float? scale=None, "
      "bool use_qk_l2norm_in_kernel=False, bool state_v_first=False, Tensor? cu_seqlens=None, "
      "bool use_gate_in_kernel=False, Tensor? A_log=None, Tensor? dt_bias=None, float? lower_bound=None, "
      "bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, ScalarType? output_dtype=None, "
      "str head_grouping='block', Tensor? num_accepted_tokens=None, Tensor(b!)? out=None) -> Tensor o";

  StatePool pool;

  auto arguments() {
    auto& gate = this->channels.gate;
    return std::tie(this->q, this->k, this->v, this->required_g, this->required_beta, pool.states, pool.indices,
                    pool.has_initial_state, pool.null_index, this->scale, this->use_qk_l2norm, this->state_v_first,
                    this->cu_seqlens, gate.use_gate, gate.A_log, gate.dt_bias, gate.lower_bound,
                    this->gates.use_beta_sigmoid, this->gates.allow_neg_eigval, this->output_dtype, this->head_grouping,
                    pool.num_accepted_tokens, this->out);
  }

  void check() {
    const Check<Int> check("fused_recurrent_kda_", "q", this->q);
    this->check_kda(check);
    this->check_token_pool(check, pool);
  }

  Tensor outputs() const { return this->output(); }
};

}  // namespace torch_gdn
