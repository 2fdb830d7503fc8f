// Kimi Delta Attention over whole sequences, for prefill, and its in-place form on a pool of states: the chunked rule
// with a log decay for each key channel, g [B, T, HV, K].
#pragma once
#include "ops/channel_gate.h"
#include "ops/gdn/chunk_gated_delta_rule.h"

namespace torch_gdn {

// The members g and gates.use_gate of the rule, whose decay is a head's, stay unset.
template <typename Int>
struct ChunkedKda : ChunkedRule<Int> {
  ChannelGateOptions channel_gate;

  void check_kda(const Check<Int>& check) {
    this->check_chunks(check);
    const auto& s = this->shape;
    const Tensor& g = this->required_g;
    check.same_dtype("v", this->v, "q", this->q);
    check.is_floating("g", g);
    check.shape("g", g, "[B, T, HV, K]", {s.B, s.T, s.HV, s.K});
    check_channel_gate_in_kernel(check, s, channel_gate);
  }
};

template <typename Int>
struct ChunkKda : ChunkedKda<Int> {
  static constexpr const char* kSchema =
      "chunk_kda(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float? scale=None, Tensor? initial_state=None, "
      "bool output_final_state=False, bool use_qk_l2norm_in_kernel=False, bool state_v_first=False, "
      "Tensor? cu_seqlens=None, int chunk_size=64, bool use_gate_in_kernel=False, Tensor? A_log=None, "
      "Tensor? dt_bias=None, float? lower_bound=None, bool use_beta_sigmoid_in_kernel=False, "
      "bool allow_neg_eigval=False, ScalarType? output_dtype=None, str head_grouping='block', "
      "bool return_intermediate_states=False) -> (Tensor o, Tensor final_state, Tensor h)";

  optional<Tensor> initial_state;
  bool output_final_state;

  auto arguments() {
    auto& gate = this->channel_gate;
    return std::tie(this->q, this->k, this->v, this->required_g, this->required_beta, this->scale, initial_state,
                    output_final_state, this->use_qk_l2norm, this->state_v_first, this->cu_seqlens, this->chunk_size,
                    gate.use_gate, gate.A_log, gate.dt_bias, gate.lower_bound, this->gates.use_beta_sigmoid,
                    this->gates.allow_neg_eigval, this->output_dtype, this->head_grouping,
                    this->return_intermediate_states);
  }

  void check() {
    const Check<Int> check("chunk_kda", "q", this->q);
    this->check_kda(check);
    check_initial_state(check, this->shape, initial_state, this->state_v_first);
  }

  std::tuple<Tensor, Tensor, Tensor> outputs() const {
    return {this->output(), final_state(this->shape, this->q, output_final_state, this->state_v_first),
            this->chunk_states()};
  }
};

template <typename Int>
struct ChunkKdaInPlace : ChunkedKda<Int> {
  static constexpr const char* kSchema =
      "chunk_kda_(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state_pool, "
      "Tensor? state_indices=None, Tensor? has_initial_state=None, int null_index=-1, float? scale=None, "
      "bool use_qk_l2norm_in_kernel=False, bool state_v_first=False, Tensor? cu_seqlens=None, int chunk_size=64, "
      "bool use_gate_in_kernel=False, Tensor? A_log=None, Tensor? dt_bias=None, float? lower_bound=None, "
      "bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, ScalarType? output_dtype=None, "
      "str head_grouping='block', Tensor? checkpoint_offsets=None, Tensor? checkpoint_indices=None, "
      "Tensor(b!)? out=None) -> Tensor o";

  StatePool pool;

  auto arguments() {
    auto& gate = this->channel_gate;
    return std::tie(this->q, this->k, this->v, this->required_g, this->required_beta, pool.states, pool.indices,
                    pool.has_initial_state, pool.null_index, this->scale, this->use_qk_l2norm, this->state_v_first,
                    this->cu_seqlens, this->chunk_size, gate.use_gate, gate.A_log, gate.dt_bias, gate.lower_bound,
                    this->gates.use_beta_sigmoid, this->gates.allow_neg_eigval, this->output_dtype, this->head_grouping,
                    pool.checkpoint_offsets, pool.checkpoint_indices, this->out);
  }

  void check() {
    const Check<Int> check("chunk_kda_", "q", this->q);
    this->return_intermediate_states = false;  // FLA has no such function
    this->check_kda(check);
    this->check_pool(check, pool);
    check_checkpoints(check, pool, this->shape, this->cu_seqlens, kCheckpointMultiple);
  }

  Tensor outputs() const { return this->output(); }
};

}  // namespace torch_gdn
