// The gradients of the end-to-end prefill ops with final gates. Raw gates have their own gradients.
#pragma once
#include "ops/gdn/gated_delta_rule.h"

namespace torch_gdn {

template <typename Int>
struct ChunkedBackward : GatedDeltaRule<Int> {
  using Shared = ChunkedBackward;

  Tensor grad_o;
  optional<Tensor> grad_final_state, initial_state;

  auto options() {
    return std::tie(grad_o, grad_final_state, this->scale, initial_state, this->use_qk_l2norm, this->state_v_first,
                    this->cu_seqlens, this->head_grouping);
  }

  void check(const char* op) {
    const Check<Int> check(op, "q", this->q);
    this->check_inputs(check);
    auto& s = this->shape;
    check.shape("beta", *this->beta, "[B, T, HV]", {s.B, s.T, s.HV});
    check.is_activation("do", grad_o).shape("[B, T, HV, V]", {s.B, s.T, s.HV, s.V});
    check_sequences(check, s, this->cu_seqlens);
    check_initial_state(check, s, initial_state, this->state_v_first);
    check_initial_state(check, s, grad_final_state, this->state_v_first, "dht");
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> outputs() const {
    const auto& s = this->shape;
    const auto f32 = this->q.options().dtype(at::kFloat);
    const Tensor dq = empty<Int>({s.B, s.T, s.H, s.K}, this->q.options());
    const Tensor dk = empty<Int>({s.B, s.T, s.H, s.K}, this->q.options());
    const Tensor dv = empty<Int>({s.B, s.T, s.HV, s.V}, this->v.options());
    const bool per_channel = this->channels.gk.has_value();
    const Tensor dg = per_channel ? empty<Int>({s.B, s.T, s.HV, s.K}, f32) : empty<Int>({s.B, s.T, s.HV}, f32);
    return {dq,
            dk,
            dv,
            dg,
            empty<Int>({s.B, s.T, s.HV}, f32),
            final_state(s, this->q, initial_state.has_value(), this->state_v_first)};
  }
};

template <typename Int>
struct ChunkGatedDeltaRuleBackward : ChunkedBackward<Int> {
  static constexpr const char* kSchema =
      "chunk_gated_delta_rule_bwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor do, Tensor? dht=None, "
      "float? scale=None, Tensor? initial_state=None, bool use_qk_l2norm_in_kernel=False, bool state_v_first=False, "
      "Tensor? cu_seqlens=None, str head_grouping='block') -> "
      "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dinitial_state)";

  auto arguments() { return std::tuple_cat(this->inputs(), this->options()); }
};

template <typename Int>
struct ChunkKdaBackward : ChunkedBackward<Int> {
  static constexpr const char* kSchema =
      "chunk_kda_bwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor do, Tensor? dht=None, "
      "float? scale=None, Tensor? initial_state=None, bool use_qk_l2norm_in_kernel=False, bool state_v_first=False, "
      "Tensor? cu_seqlens=None, str head_grouping='block') -> "
      "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dinitial_state)";

  auto arguments() { return std::tuple_cat(this->kda_inputs(), this->options()); }
};

}  // namespace torch_gdn
