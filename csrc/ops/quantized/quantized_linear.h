// Computes y = x W^T + bias with packed W. Sums are f32, and y is rounded once.
#pragma once
#include "ops/quantized/packed.h"

namespace torch_gdn {

template <typename Int>
struct QuantizedLinear {
  static constexpr const char* kSchema =
      "quantized_linear(Tensor x, Tensor weight, Tensor scales, Tensor? biases, Tensor? bias=None) -> Tensor";

  Tensor x, weight, scales;
  optional<Tensor> biases, bias;

  Int N = 0, K = 0;
  Packing packing;

  auto arguments() { return std::tie(x, weight, scales, biases, bias); }

  void check(const char* op) {
    const Check<Int> check(op, "x", x);
    check.is_activation("x", x);
    check.at_least_one_dimension("x", x);
    K = size_of<Int>(x, -1);
    check.value(sym_ge(K, Int(1)), "x", "at least one column", K);
    check.dimensions("weight", weight, 2, "[N, K * bits / 32] or [N, K]");
    N = size_of<Int>(weight, 0);
    check.value(sym_ge(N, Int(1)), "weight", "at least one row", N);
    packing = check_packed(check, {"weight", "scales", "biases"}, weight, scales, biases, Sizes<Int>{N}, K);
    if (!bias.has_value()) return;
    check.is_activation("bias", *bias).shape("[N]", {N});
  }

  Tensor outputs() const { return empty<Int>(with_last(sizes_without_last<Int>(x), N), x.options()); }
};

}  // namespace torch_gdn
