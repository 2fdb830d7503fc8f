// The gradients of causal_conv1d. The residual's is dy itself.
#pragma once
#include "ops/layers/causal_conv1d.h"

namespace torch_gdn {

template <typename Int>
struct CausalConv1dBwd : CausalConvolution<Int> {
  static constexpr const char* kSchema =
      "causal_conv1d_bwd(Tensor dy, Tensor x, Tensor weight, Tensor? bias=None, Tensor? initial_state=None, "
      "Tensor? dfinal_state=None, str? activation=None, Tensor? cu_seqlens=None, Tensor? seq_idx=None, "
      "bool output_dweight=True) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_state)";

  Tensor dy;
  optional<Tensor> initial_state, dfinal_state, seq_idx;
  bool output_dweight;

  auto arguments() {
    return std::tie(dy, this->x, this->weight, this->bias, initial_state, dfinal_state, this->activation,
                    this->cu_seqlens, seq_idx, output_dweight);
  }

  void check(const char* op) {
    const Check<Int> check(op, "dy", dy);
    check.is_activation("dy", dy).dimensions(3, "[B, T, D]");
    this->check_inputs(check);
    check.same_dtype("x", this->x, "dy", dy);
    check.same_shape("x", this->x, "dy", dy);
    for (const auto& [name, state] : {std::pair{"initial_state", &initial_state}, {"dfinal_state", &dfinal_state}}) {
      if (!state->has_value()) continue;
      check.dimensions(name, **state, 3, "[N, D, S]");
      this->check_state(check, name, **state, "[N, D, S]", this->shape.N);
    }
    if (initial_state.has_value() && dfinal_state.has_value()) {
      check.same_dtype("dfinal_state", *dfinal_state, "initial_state", *initial_state);
      check.same_shape("dfinal_state", *dfinal_state, "initial_state", *initial_state);
    }
    if (!seq_idx.has_value()) return;
    this->check_seq_idx(check, *seq_idx, !initial_state.has_value() && !dfinal_state.has_value(),
                        "None with cu_seqlens, initial_state or dfinal_state");
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor> outputs() const {
    const auto options = this->weight.options();
    return {empty<Int>({this->shape.B, this->shape.T, this->D}, this->x.options()),
            output_dweight ? empty<Int>({this->D, this->W}, options) : no_output(options),
            output_dweight && this->bias.has_value() ? empty<Int>({this->D}, options) : no_output(options),
            initial_state.has_value() ? empty(sizes_of<Int>(*initial_state), initial_state->options())
                                      : no_output(this->x.options())};
  }
};

}  // namespace torch_gdn
