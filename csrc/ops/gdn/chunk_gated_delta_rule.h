// The end-to-end op of prefill, and its in-place form on a pool of states.
#pragma once
#include "ops/gdn/gated_delta_rule.h"

namespace torch_gdn {

// return_intermediate_states: h, the state before each chunk.
template <typename Int>
struct ChunkedRule : GatedDeltaRule<Int> {
  Tensor required_g, required_beta;  // optional in the recurrent op
  optional<Tensor> chunk_indices;
  int64_t chunk_size;
  bool return_intermediate_states;

  // Not of g, where it is another op's.
  void check_chunks(const Check<Int>& check) {
    this->beta = required_beta;
    check_chunk_size(check, chunk_size);
    this->check_inputs(check);
    auto& s = this->shape;
    s.C = chunk_size;
    check.shape("beta", required_beta, "[B, T, HV]", {s.B, s.T, s.HV});
    check_sequences(check, s, this->cu_seqlens, chunk_indices);
  }

  void check_chunked(const Check<Int>& check) {
    this->g = required_g;
    check_chunks(check);
  }

  bool has_one_dtype() const { return this->v.scalar_type() == this->q.scalar_type(); }

  // A state may leave half's range: intermediates of half are float32. So are those of two dtypes, none of which holds
  // all of the other.
  at::TensorOptions intermediate_options() const {
    const bool is_bfloat16 = has_one_dtype() && this->q.scalar_type() == at::kBFloat16;
    return this->q.options().dtype(is_bfloat16 ? at::kBFloat16 : at::kFloat);
  }

  Tensor chunk_states() const {
    const auto& s = this->shape;
    return return_intermediate_states
               ? empty<Int>(state_sizes({s.B, s.NT}, s, this->state_v_first), intermediate_options())
               : no_output(intermediate_options());
  }
};

template <typename Int>
struct ChunkGatedDeltaRule : ChunkedRule<Int> {
  static constexpr const char* kSchema =
      "chunk_gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float? scale=None, "
      "Tensor? initial_state=None, bool output_final_state=False, bool use_qk_l2norm_in_kernel=False, "
      "bool state_v_first=False, Tensor? cu_seqlens=None, Tensor? chunk_indices=None, int chunk_size=64, "
      "bool use_gate_in_kernel=False, Tensor? A_log=None, Tensor? dt_bias=None, "
      "bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, ScalarType? output_dtype=None, "
      "str head_grouping='block', bool return_intermediate_states=False) -> "
      "(Tensor o, Tensor final_state, Tensor h)";

  optional<Tensor> initial_state;
  bool output_final_state;

  auto arguments() {
    return std::tie(this->q, this->k, this->v, this->required_g, this->required_beta, this->scale, initial_state,
                    output_final_state, this->use_qk_l2norm, this->state_v_first, this->cu_seqlens, this->chunk_indices,
                    this->chunk_size, this->gates.use_gate, this->gates.A_log, this->gates.dt_bias,
                    this->gates.use_beta_sigmoid, this->gates.allow_neg_eigval, this->output_dtype, this->head_grouping,
                    this->return_intermediate_states);
  }

  void check() {
    const Check<Int> check("chunk_gated_delta_rule", "q", this->q);
    this->check_chunked(check);
    check_initial_state(check, this->shape, initial_state, this->state_v_first);
  }

  std::tuple<Tensor, Tensor, Tensor> outputs() const {
    return {this->output(), final_state(this->shape, this->q, output_final_state, this->state_v_first),
            this->chunk_states()};
  }
};

template <typename Int>
struct ChunkGatedDeltaRuleInPlace : ChunkedRule<Int> {
  static constexpr const char* kSchema =
      "chunk_gated_delta_rule_(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state_pool, "
      "Tensor? state_indices=None, Tensor? has_initial_state=None, int null_index=-1, float? scale=None, "
      "bool use_qk_l2norm_in_kernel=False, bool state_v_first=False, Tensor? cu_seqlens=None, "
      "Tensor? chunk_indices=None, int chunk_size=64, bool use_gate_in_kernel=False, Tensor? A_log=None, "
      "Tensor? dt_bias=None, bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, "
      "ScalarType? output_dtype=None, str head_grouping='block', bool return_intermediate_states=False, "
      "Tensor? checkpoint_offsets=None, Tensor? checkpoint_indices=None, Tensor(b!)? out=None) -> (Tensor o, Tensor h)";

  StatePool pool;

  auto arguments() {
    return std::tie(this->q, this->k, this->v, this->required_g, this->required_beta, pool.states, pool.indices,
                    pool.has_initial_state, pool.null_index, this->scale, this->use_qk_l2norm, this->state_v_first,
                    this->cu_seqlens, this->chunk_indices, this->chunk_size, this->gates.use_gate, this->gates.A_log,
                    this->gates.dt_bias, this->gates.use_beta_sigmoid, this->gates.allow_neg_eigval, this->output_dtype,
                    this->head_grouping, this->return_intermediate_states, pool.checkpoint_offsets,
                    pool.checkpoint_indices, this->out);
  }

  void check() {
    const Check<Int> check("chunk_gated_delta_rule_", "q", this->q);
    this->check_chunked(check);
    this->check_pool(check, pool);
    check_checkpoints(check, pool, this->shape, this->cu_seqlens, kCheckpointMultiple);
  }

  std::tuple<Tensor, Tensor> outputs() const { return {this->output(), this->chunk_states()}; }
};

}  // namespace torch_gdn
