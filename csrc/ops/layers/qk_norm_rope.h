// Prepares the heads of q and k for attention. If there are weights, it applies the RMS norm of each head. It then
// rotates the head's first 2 P elements in pairs (i, i + P) by the token's angles, whose cosines and sines are inputs.
// It computes in f32 and rounds once.
#pragma once
#include "ops/op.h"

namespace torch_gdn {

template <typename Int>
struct QkNormRope {
  static constexpr const char* kSchema =
      "qk_norm_rope(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? q_weight=None, Tensor? k_weight=None, "
      "float eps=1e-6, bool zero_centered=False, bool heads_first=False) -> (Tensor q_out, Tensor k_out)";

  Tensor q, k, cos, sin;
  optional<Tensor> q_weight, k_weight;
  double eps;
  bool zero_centered, heads_first;

  Int B = 0, T = 0, D = 0, P = 0;

  auto arguments() { return std::tie(q, k, cos, sin, q_weight, k_weight, eps, zero_centered, heads_first); }

  void check(const char* op) {
    const Check<Int> check(op, "q", q);
    check.is_activation("q", q).dimensions(4, "[B, T, HQ, D]");
    check.dimensions("k", k, 4, "[B, T, HK, D]");
    B = size_of<Int>(q, 0), T = size_of<Int>(q, 1), D = size_of<Int>(q, 3);
    check.same_dtype("k", k, "q", q).shape("[B, T, HK, D]", {B, T, size_of<Int>(k, 2), D});
    check_angles(check);
    check.value(q_weight.has_value() == k_weight.has_value(), "k_weight", "a weight if q_weight is given, else None",
                k_weight.has_value() ? "a weight" : "None");
    check.value(q_weight.has_value() || !zero_centered, "zero_centered", "False when there are no weights", "True");
    if (q_weight.has_value()) {
      check.is_activation("q_weight", *q_weight).shape("[D]", {D});
      check.same_dtype("k_weight", *k_weight, "q_weight", *q_weight).shape("[D]", {D});
    }
    check.value(eps >= 0, "eps", "a non-negative number", eps);
  }

  std::tuple<Tensor, Tensor> outputs() const { return {output(q), output(k)}; }

 private:
  void check_angles(const Check<Int>& check) {
    check.is_activation("cos", cos).dimensions(3, "[B, T, P]");
    P = size_of<Int>(cos, 2);
    check.shape("cos", cos, "[B, T, P]", {B, T, P});
    check.value(sym_le(Int(1), P), "cos", "at least one pair", P);
    check.value(sym_le(P * Int(2), D), "cos", "at most D / 2 pairs", P, " for D ", D);
    check.same_dtype("sin", sin, "cos", cos);
    check.same_shape("sin", sin, "cos", cos);
  }

  Tensor output(const Tensor& x) const {
    const Int heads = size_of<Int>(x, 2);
    return heads_first ? empty({B, heads, T, D}, x.options()) : empty({B, T, heads, D}, x.options());
  }
};

}  // namespace torch_gdn
