// The end-to-end prefill op, and its in-place form on a pool of states.
#pragma once
#include "ops/gdn/gated_delta_rule.h"

namespace torch_gdn {

// With return_intermediate_states the op also returns h, the state before each chunk.
template <typename Int>
struct ChunkedRule : GatedDeltaRule<Int> {
  optional<Tensor> chunk_indices;
  int64_t chunk_size;
  bool return_intermediate_states;

  // Checks everything except the states.
  void check_chunked(const Check<Int>& check) {
    check_chunk_size(check, chunk_size);
    this->check_inputs(check);
    auto& s = this->shape;
    s.C = chunk_size;
    check.shape("beta", *this->beta, "[B, T, HV]", {s.B, s.T, s.HV});
    check_sequences(check, s, this->cu_seqlens, chunk_indices);
  }

  bool has_one_dtype() const { return this->v.scalar_type() == this->q.scalar_type(); }

  // Returns the dtype of the intermediates. It is float32 for half, because a state may leave half's range, and for
  // mixed dtypes, because neither holds every value of the other.
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

// The form that takes and returns states.
template <typename Int>
struct ChunkedCall : ChunkedRule<Int> {
  optional<Tensor> initial_state;
  bool output_final_state;

  void check_as(const char* op) {
    const Check<Int> check(op, "q", this->q);
    this->check_chunked(check);
    check_initial_state(check, this->shape, initial_state, this->state_v_first);
  }

  std::tuple<Tensor, Tensor, Tensor> outputs() const {
    return {this->output(), final_state(this->shape, this->q, output_final_state, this->state_v_first),
            this->chunk_states()};
  }
};

// The form that updates a pool of states in place.
template <typename Int>
struct ChunkedCallInPlace : ChunkedRule<Int> {
  StatePool pool;

  void check_as(const char* op) {
    const Check<Int> check(op, "q", this->q);
    this->check_chunked(check);
    this->check_pool(check, pool);
    check_checkpoints(check, pool, this->shape, this->cu_seqlens, kCheckpointMultiple);
  }

  std::tuple<Tensor, Tensor> outputs() const { return {this->output(), this->chunk_states()}; }
};

template <typename Int>
struct ChunkGatedDeltaRule : ChunkedCall<Int> {
  static constexpr const char* kSchema =
      "chunk_gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float? scale=None, "
      "Tensor? initial_state=None, bool output_final_state=False, bool use_qk_l2norm_in_kernel=False, "
      "bool state_v_first=False, Tensor? cu_seqlens=None, Tensor? chunk_indices=None, int chunk_size=64, "
      "bool use_gate_in_kernel=False, Tensor? A_log=None, Tensor? dt_bias=None, "
      "bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, ScalarType? output_dtype=None, "
      "str head_grouping='block', bool return_intermediate_states=False) -> "
      "(Tensor o, Tensor final_state, Tensor h)";

  auto arguments() {
    return std::tie(this->q, this->k, this->v, required(this->g), required(this->beta), this->scale,
                    this->initial_state, this->output_final_state, this->use_qk_l2norm, this->state_v_first,
                    this->cu_seqlens, this->chunk_indices, this->chunk_size, this->gates.use_gate, this->gates.A_log,
                    this->gates.dt_bias, this->gates.use_beta_sigmoid, this->gates.allow_neg_eigval, this->output_dtype,
                    this->head_grouping, this->return_intermediate_states);
  }

  void check() { this->check_as("chunk_gated_delta_rule"); }
};

template <typename Int>
struct ChunkGatedDeltaRuleInPlace : ChunkedCallInPlace<Int> {
  static constexpr const char* kSchema =
      "chunk_gated_delta_rule_(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state_pool, "
      "Tensor? state_indices=None, Tensor? has_initial_state=None, int null_index=-1, float? scale=None, "
      "bool use_qk_l2norm_in_kernel=False, bool state_v_first=False, Tensor? cu_seqlens=None, "
      "Tensor? chunk_indices=None, int chunk_size=64, bool use_gate_in_kernel=False, Tensor? A_log=None, "
      "Tensor? dt_bias=None, bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, "
      "ScalarType? output_dtype=None, str head_grouping='block', bool return_intermediate_states=False, "
      "Tensor? checkpoint_offsets=None, Tensor? checkpoint_indices=None, Tensor(b!)? out=None) -> (Tensor o, Tensor h)";

  auto arguments() {
    return std::tie(this->q, this->k, this->v, required(this->g), required(this->beta), this->pool.states,
                    this->pool.indices, this->pool.has_initial_state, this->pool.null_index, this->scale,
                    this->use_qk_l2norm, this->state_v_first, this->cu_seqlens, this->chunk_indices, this->chunk_size,
                    this->gates.use_gate, this->gates.A_log, this->gates.dt_bias, this->gates.use_beta_sigmoid,
                    this->gates.allow_neg_eigval, this->output_dtype, this->head_grouping,
                    this->return_intermediate_states, this->pool.checkpoint_offsets, this->pool.checkpoint_indices,
                    this->out);
  }

  void check() { this->check_as("chunk_gated_delta_rule_"); }
};

}  // namespace torch_gdn
