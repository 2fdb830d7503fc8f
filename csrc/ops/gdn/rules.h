// The end-to-end ops, and their in-place forms on a pool of states.
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
    return empty_if<Int>(return_intermediate_states, state_sizes({s.B, s.NT}, s, this->state_v_first),
                         intermediate_options());
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

// beta is [B, T, HV] or [B, T, HV, V], or None, which means 1. Without g there is no decay.
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

// Kimi Delta Attention is the gated delta rule under FLA's names. Its g [B, T, HV, K] is the rule's gk, and has its own
// gate.
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
