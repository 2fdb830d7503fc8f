// Kimi Delta Attention is the gated delta rule under FLA's names. Its g [B, T, HV, K] is the rule's gk, and has its own
// gate.
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
    return std::tuple_cat(this->kda_inputs(), this->options(), std::tie(this->chunk_size), this->kda_gates(),
                          this->output_options(), std::tie(this->return_intermediate_states));
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
    return std::tuple_cat(this->kda_inputs(), this->pool.slots(), this->options(), std::tie(this->chunk_size),
                          this->kda_gates(), this->output_options(), this->results());
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
    return std::tuple_cat(this->kda_inputs(), this->options(), this->kda_gates(), this->output_options());
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
    return std::tuple_cat(this->kda_inputs(), this->pool.slots(), this->options(), this->kda_gates(),
                          this->output_options(), this->results());
  }
};

}  // namespace torch_gdn
