// Kimi Delta Attention: the gated delta rule under FLA's names. g [B, T, HV, K] is the rule's gk and has its own gate.
#pragma once
#include "ops/gdn/chunk_gated_delta_rule.h"
#include "ops/gdn/fused_recurrent_gated_delta_rule.h"

namespace torch_gdn {

template <typename Int>
struct ChunkKda : ChunkedCall<Int> {
  static constexpr const char* kSchema =
      "chunk_kda(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float? scale=None, Tensor? initial_state=None, "
      "bool output_final_state=False, bool use_qk_l2norm_in_kernel=False, bool state_v_first=False, "
      "Tensor? cu_seqlens=None, int chunk_size=64, bool use_gate_in_kernel=False, Tensor? A_log=None, "
      "Tensor? dt_bias=None, float? lower_bound=None, bool use_beta_sigmoid_in_kernel=False, "
      "bool allow_neg_eigval=False, ScalarType? output_dtype=None, str head_grouping='block', "
      "bool return_intermediate_states=False) -> (Tensor o, Tensor final_state, Tensor h)";

  auto arguments() {
    auto& gate = this->channels.gate;
    return std::tie(this->q, this->k, this->v, required(this->channels.gk), required(this->beta), this->scale,
                    this->initial_state, this->output_final_state, this->use_qk_l2norm, this->state_v_first,
                    this->cu_seqlens, this->chunk_size, gate.use_gate, gate.A_log, gate.dt_bias, gate.lower_bound,
                    this->gates.use_beta_sigmoid, this->gates.allow_neg_eigval, this->output_dtype, this->head_grouping,
                    this->return_intermediate_states);
  }

  void check() {
    this->channels.gk_name = "g";
    this->check_as("chunk_kda");
  }
};

template <typename Int>
struct ChunkKdaInPlace : ChunkedCallInPlace<Int> {
  static constexpr const char* kSchema =
      "chunk_kda_(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state_pool, "
      "Tensor? state_indices=None, Tensor? has_initial_state=None, int null_index=-1, float? scale=None, "
      "bool use_qk_l2norm_in_kernel=False, bool state_v_first=False, Tensor? cu_seqlens=None, int chunk_size=64, "
      "bool use_gate_in_kernel=False, Tensor? A_log=None, Tensor? dt_bias=None, float? lower_bound=None, "
      "bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, ScalarType? output_dtype=None, "
      "str head_grouping='block', bool return_intermediate_states=False, Tensor? checkpoint_offsets=None, "
      "Tensor? checkpoint_indices=None, Tensor(b!)? out=None) -> (Tensor o, Tensor h)";

  auto arguments() {
    auto& gate = this->channels.gate;
    return std::tie(this->q, this->k, this->v, required(this->channels.gk), required(this->beta), this->pool.states,
                    this->pool.indices, this->pool.has_initial_state, this->pool.null_index, this->scale,
                    this->use_qk_l2norm, this->state_v_first, this->cu_seqlens, this->chunk_size, gate.use_gate,
                    gate.A_log, gate.dt_bias, gate.lower_bound, this->gates.use_beta_sigmoid,
                    this->gates.allow_neg_eigval, this->output_dtype, this->head_grouping,
                    this->return_intermediate_states, this->pool.checkpoint_offsets, this->pool.checkpoint_indices,
                    this->out);
  }

  void check() {
    this->channels.gk_name = "g";
    this->check_as("chunk_kda_");
  }
};

template <typename Int>
struct FusedRecurrentKda : RecurrentCall<Int> {
  static constexpr const char* kSchema =
      "fused_recurrent_kda(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float? scale=None, "
      "Tensor? initial_state=None, bool output_final_state=False, bool use_qk_l2norm_in_kernel=False, "
      "bool state_v_first=False, Tensor? cu_seqlens=None, bool use_gate_in_kernel=False, Tensor? A_log=None, "
      "Tensor? dt_bias=None, float? lower_bound=None, bool use_beta_sigmoid_in_kernel=False, "
      "bool allow_neg_eigval=False, ScalarType? output_dtype=None, str head_grouping='block') -> "
      "(Tensor o, Tensor final_state)";

  auto arguments() {
    auto& gate = this->channels.gate;
    return std::tie(this->q, this->k, this->v, required(this->channels.gk), required(this->beta), this->scale,
                    this->initial_state, this->output_final_state, this->use_qk_l2norm, this->state_v_first,
                    this->cu_seqlens, gate.use_gate, gate.A_log, gate.dt_bias, gate.lower_bound,
                    this->gates.use_beta_sigmoid, this->gates.allow_neg_eigval, this->output_dtype,
                    this->head_grouping);
  }

  void check() {
    this->channels.gk_name = "g";
    this->check_as("fused_recurrent_kda");
  }
};

template <typename Int>
struct FusedRecurrentKdaInPlace : RecurrentCallInPlace<Int> {
  static constexpr const char* kSchema =
      "fused_recurrent_kda_(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state_pool, "
      "Tensor? state_indices=None, Tensor? has_initial_state=None, int null_index=-1, float? scale=None, "
      "bool use_qk_l2norm_in_kernel=False, bool state_v_first=False, Tensor? cu_seqlens=None, "
      "bool use_gate_in_kernel=False, Tensor? A_log=None, Tensor? dt_bias=None, float? lower_bound=None, "
      "bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, ScalarType? output_dtype=None, "
      "str head_grouping='block', Tensor? num_accepted_tokens=None, Tensor(b!)? out=None) -> Tensor o";

  auto arguments() {
    auto& gate = this->channels.gate;
    return std::tie(this->q, this->k, this->v, required(this->channels.gk), required(this->beta), this->pool.states,
                    this->pool.indices, this->pool.has_initial_state, this->pool.null_index, this->scale,
                    this->use_qk_l2norm, this->state_v_first, this->cu_seqlens, gate.use_gate, gate.A_log, gate.dt_bias,
                    gate.lower_bound, this->gates.use_beta_sigmoid, this->gates.allow_neg_eigval, this->output_dtype,
                    this->head_grouping, this->pool.num_accepted_tokens, this->out);
  }

  void check() {
    this->channels.gk_name = "g";
    this->check_as("fused_recurrent_kda_");
  }
};

}  // namespace torch_gdn
