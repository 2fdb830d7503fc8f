// Computes x / sqrt(mean x^2 + eps) * weight * silu(g), or sigmoid(g), over the last dimension. With round_norm, the op
// rounds to x's dtype before it multiplies by the weight.
#pragma once
#include <string_view>

#include "ops/layers/norm.h"

namespace torch_gdn {

template <typename Int>
struct RmsNormGated {
  static constexpr const char* kSchema =
      "rms_norm_gated(Tensor x, Tensor g, Tensor? weight=None, str activation='silu', float eps=1e-6, "
      "bool round_norm=False) -> Tensor";

  static constexpr int64_t kLargestRow = 16384;

  Tensor x, g;
  optional<Tensor> weight;
  std::string_view activation;
  double eps;
  bool round_norm;

  Int D = 0;

  auto arguments() { return std::tie(x, g, weight, activation, eps, round_norm); }

  bool has_sigmoid() const { return activation == "sigmoid"; }
  // A product of two numbers of x's dtype has that dtype too.
  bool round_product() const { return round_norm && weight.has_value() && weight->scalar_type() == x.scalar_type(); }

  void check(const char* op) {
    const Check<Int> check(op, "x", x);
    D = check_rows<Int>(check, x, weight, eps, "a last dimension from 1 to 16384", kLargestRow);
    check.is_activation("g", g);
    check.same_shape("g", g, "x", x);
    check.value(activation == "silu" || activation == "swish" || has_sigmoid(), "activation",
                "'silu', 'swish' or 'sigmoid'", "'", activation, "'");
  }

  Tensor outputs() const { return empty(sizes_of<Int>(x), x.options()); }
};

}  // namespace torch_gdn
