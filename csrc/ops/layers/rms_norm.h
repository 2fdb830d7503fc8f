// y = h / sqrt(mean h^2 + eps) * weight over the last dimension, where h = x + residual, in f32, is the second output.
// zero_centered: 1 + weight in its place. round_norm: rounded to x's dtype before the weight.
#pragma once
#include "ops/op.h"

namespace torch_gdn {

template <typename Int>
struct RmsNorm {
  static constexpr const char* kSchema =
      "rms_norm(Tensor x, Tensor? weight=None, Tensor? residual=None, float eps=1e-6, bool zero_centered=False, "
      "bool round_norm=False) -> (Tensor y, Tensor residual_out)";

  static constexpr int64_t kLargestRow = 16384;

  Tensor x;
  optional<Tensor> weight, residual;
  double eps;
  bool zero_centered, round_norm;

  Int D = 0;

  auto arguments() { return std::tie(x, weight, residual, eps, zero_centered, round_norm); }

  void check() {
    const Check<Int> check("rms_norm", "x", x);
    check.is_activation("x", x);
    check.at_least_one_dimension("x", x);
    D = size_of<Int>(x, -1);
    check.in_range("x", "a last dimension from 1 to 16384", D, 1, kLargestRow);
    if (weight.has_value()) {
      check.is_activation("weight", *weight);
      check.shape("weight", *weight, "[D]", {D});
    }
    if (residual.has_value()) {
      check.same_dtype("residual", *residual, "x", x);
      check.same_shape("residual", *residual, "x", x);
    }
    check.value(eps >= 0, "eps", "a number that is not negative", eps);
    check.value(weight.has_value() || !zero_centered, "zero_centered", "False where there is no weight", "True");
  }

  std::tuple<Tensor, Tensor> outputs() const {
    return {empty(sizes_of<Int>(x), x.options()),
            residual.has_value() ? empty(sizes_of<Int>(x), x.options()) : no_output(x.options())};
  }
};

}  // namespace torch_gdn
