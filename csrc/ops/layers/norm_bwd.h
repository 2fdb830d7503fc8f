// The gradients of rms_norm, rms_norm_gated and l2norm. With n = x rstd, a row's output is n (weight + offset) act(g),
// and dh is the gradient of the sum that rms_norm normalised, which is x here. rstd has the mean of x^2, or the sum
// with `over_sum`. Roundings of the forward count as identities.
#pragma once
#include <string_view>

#include "ops/layers/norm.h"

namespace torch_gdn {

template <typename Int>
struct NormBwd {
  static constexpr const char* kSchema =
      "norm_bwd(Tensor dy, Tensor x, Tensor? weight=None, Tensor? g=None, Tensor? dh=None, str activation='silu', "
      "float eps=1e-6, bool zero_centered=False, bool over_sum=False, bool output_dweight=True) -> "
      "(Tensor dx, Tensor dg, Tensor dweight)";

  static constexpr int64_t kLargestRow = 16384;

  Tensor dy, x;
  optional<Tensor> weight, g, dh;
  std::string_view activation;
  double eps;
  bool zero_centered, over_sum, output_dweight;

  Int D = 0;

  auto arguments() { return std::tie(dy, x, weight, g, dh, activation, eps, zero_centered, over_sum, output_dweight); }

  bool has_sigmoid() const { return activation == "sigmoid"; }
  bool has_dweight() const { return output_dweight && weight.has_value(); }

  void check(const char* op) {
    const Check<Int> check(op, "dy", dy);
    check.is_activation("dy", dy);
    D = check_rows<Int>(check, x, weight, eps, "a last dimension from 1 to 16384", kLargestRow);
    check.same_dtype("x", x, "dy", dy);
    check.same_shape("x", x, "dy", dy);
    if (g.has_value()) check.is_activation("g", *g), check.same_shape("g", *g, "dy", dy);
    if (dh.has_value()) check.same_dtype("dh", *dh, "dy", dy), check.same_shape("dh", *dh, "dy", dy);
    check.value(activation == "silu" || activation == "swish" || has_sigmoid(), "activation",
                "'silu', 'swish' or 'sigmoid'", "'", activation, "'");
    check.value(weight.has_value() || !zero_centered, "zero_centered", "False when there is no weight", "True");
  }

  std::tuple<Tensor, Tensor, Tensor> outputs() const {
    const auto weight_options = weight.value_or(x).options();
    return {empty(sizes_of<Int>(x), x.options()),
            g.has_value() ? empty(sizes_of<Int>(x), g->options()) : no_output(x.options()),
            has_dweight() ? empty<Int>({D}, weight_options) : no_output(weight_options)};
  }
};

}  // namespace torch_gdn
