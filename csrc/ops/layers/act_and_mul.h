// Computes y = silu(gate) * up, or sigmoid(gate) * up, element by element.
#pragma once
#include <string_view>

#include "ops/op.h"

namespace torch_gdn {

template <typename Int>
struct ActAndMul {
  static constexpr const char* kSchema = "act_and_mul(Tensor gate, Tensor up, str activation='silu') -> Tensor";

  Tensor gate, up;
  std::string_view activation;

  auto arguments() { return std::tie(gate, up, activation); }

  bool has_sigmoid() const { return activation == "sigmoid"; }

  void check(const char* op) {
    const Check<Int> check(op, "gate", gate);
    check.is_activation("gate", gate);
    check.at_least_one_dimension("gate", gate);
    check.same_dtype("up", up, "gate", gate);
    check.same_shape("up", up, "gate", gate);
    check.value(activation == "silu" || activation == "swish" || has_sigmoid(), "activation",
                "'silu', 'swish' or 'sigmoid'", "'", activation, "'");
  }

  Tensor outputs() const { return empty(sizes_of<Int>(gate), gate.options()); }
};

}  // namespace torch_gdn
