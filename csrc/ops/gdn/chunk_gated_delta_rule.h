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

  auto chunks() { return std::tie(chunk_indices, chunk_size); }

  // Checks everything except the states.
  void check_rule(const Check<Int>& check) {
    check_chunk_size(check, chunk_size);
    this->check_inputs(check);
    auto& s = this->shape;
    s.C = chunk_size;
    check.shape("beta", *this->beta, "[B, T, HV]", {s.B, s.T, s.HV});
    check_sequences(check, s, this->cu_seqlens, chunk_indices);
  }

  void check_states(const Check<Int>& check, const StatePool& pool) const {
    this->check_pool(check, pool);
    check_checkpoints(check, pool, this->shape, this->cu_seqlens, kCheckpointMultiple);
  }

  bool has_one_dtype() const { return this->v.scalar_type() == this->q.scalar_type(); }

  // Returns the dtype of the intermediates. It is float32 for half, because a state may leave half's range. It is also
  // float32 for mixed dtypes, because neither dtype holds every value of the other.
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
struct ChunkedCall : WithStates<ChunkedRule<Int>, Int> {
  using Shared = ChunkedCall;

  std::tuple<Tensor, Tensor, Tensor> outputs() const {
    return {this->output(), this->new_state(), this->chunk_states()};
  }
};

template <typename Int>
struct ChunkedCallInPlace : WithPool<ChunkedRule<Int>, Int> {
  using Shared = ChunkedCallInPlace;

  auto results() {
    return std::tie(this->return_intermediate_states, this->pool.checkpoint_offsets, this->pool.checkpoint_indices,
                    this->out);
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
    return std::tuple_cat(this->inputs(), this->options(), this->chunks(), this->gates.arguments(),
                          this->output_options(), std::tie(this->return_intermediate_states));
  }
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
    return std::tuple_cat(this->inputs(), this->pool.slots(), this->options(), this->chunks(), this->gates.arguments(),
                          this->output_options(), this->results());
  }
};

}  // namespace torch_gdn
