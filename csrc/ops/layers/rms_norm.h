// Computes y = h / sqrt(mean h^2 + eps) * weight over the last dimension. h = x + residual, in f32, is the second
// output. With zero_centered, the factor is 1 + weight. With round_norm, the op rounds to x's dtype before it
// multiplies by the weight.
#pragma once
#include "ops/layers/norm.h"

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

  void check(const char* op) {
    const Check<Int> check(op, "x", x);
    D = check_rows<Int>(check, x, weight, eps, "a last dimension from 1 to 16384", kLargestRow);
    if (residual.has_value()) {
      check.same_dtype("residual", *residual, "x", x);
      check.same_shape("residual", *residual, "x", x);
    }
    check.value(weight.has_value() || !zero_centered, "zero_centered", "False when there is no weight", "True");
  }

  std::tuple<Tensor, Tensor> outputs() const {
    return {empty(sizes_of<Int>(x), x.options()),
            residual.has_value() ? empty(sizes_of<Int>(x), x.options()) : no_output(x.options())};
  }
};

}  // namespace torch_gdn
