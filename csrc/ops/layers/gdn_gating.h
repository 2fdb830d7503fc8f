// Computes g = -exp(A_log) softplus(a + dt_bias), and beta = sigmoid(b), or twice that with allow_neg_eigval. Both are
// float32.
#pragma once
#include "ops/op.h"

namespace torch_gdn {

template <typename Int>
struct GdnGating {
  static constexpr const char* kSchema =
      "gdn_gating(Tensor A_log, Tensor a, Tensor b, Tensor? dt_bias=None, bool allow_neg_eigval=False) -> "
      "(Tensor g, Tensor beta)";

  Tensor A_log, a, b;
  optional<Tensor> dt_bias;
  bool allow_neg_eigval;

  Int HV = 0;

  auto arguments() { return std::tie(A_log, a, b, dt_bias, allow_neg_eigval); }

  void check(const char* op) {
    const Check<Int> check(op, "A_log", A_log);
    check.is_activation("A_log", A_log).dimensions(1, "[HV]");
    HV = size_of<Int>(A_log, 0);
    check.value(sym_ge(HV, Int(1)), "A_log", "at least one head", HV);
    check.is_activation("a", a);
    check.value(a.dim() >= 1 && holds(sym_eq(size_of<Int>(a, -1), HV)), "a", "shape [..., HV] with the HV of A_log",
                sizes_of<Int>(a));
    check.on_device("a", a);
    check.is_activation("b", b);
    check.same_shape("b", b, "a", a);
    if (!dt_bias.has_value()) return;
    check.is_activation("dt_bias", *dt_bias).shape("[HV]", {HV});
  }

  std::tuple<Tensor, Tensor> outputs() const {
    const auto options = a.options().dtype(at::kFloat);
    return {empty(sizes_of<Int>(a), options), empty(sizes_of<Int>(a), options)};
  }
};

}  // namespace torch_gdn
