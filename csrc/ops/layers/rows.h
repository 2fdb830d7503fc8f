// The ops that treat each row by itself.
#pragma once
#include <string_view>

#include "ops/op.h"

namespace torch_gdn {

constexpr int64_t kLargestRow = 16384;  // of a norm

template <typename Int>
void check_activation(const Check<Int>& check, const char* argument, std::string_view activation) {
  check.value(activation == "silu" || activation == "swish" || activation == "sigmoid", argument,
              "'silu', 'swish' or 'sigmoid'", "'", activation, "'");
}

// Checks the rows of a norm and returns their length.
template <typename Int>
Int check_rows(const Check<Int>& check, const Tensor& x, const optional<Tensor>& weight, double eps) {
  check.is_rows("x", x);
  const Int D = size_of<Int>(x, -1);
  static_assert(kLargestRow == 16384);
  check.in_range("x", "a last dimension from 1 to 16384", D, 1, kLargestRow);
  if (weight.has_value()) check.is_activation("weight", *weight).shape("[D]", {D});
  check.value(eps >= 0, "eps", "a non-negative number", eps);
  return D;
}

// Computes y = silu(gate) * up, or sigmoid(gate) * up, element by element.
template <typename Int>
struct ActAndMul {
  static constexpr const char* kSchema = "act_and_mul(Tensor gate, Tensor up, str activation='silu') -> Tensor";

  Tensor gate, up;
  std::string_view activation;

  auto arguments() { return std::tie(gate, up, activation); }

  bool has_sigmoid() const { return activation == "sigmoid"; }

  void check(const char* op) {
    const Check<Int> check(op, "gate", gate);
    check.is_rows("gate", gate);
    check.like("up", up, "gate", gate);
    check_activation(check, "activation", activation);
  }

  Tensor outputs() const { return empty(sizes_of<Int>(gate), gate.options()); }
};

// Computes y = x rstd with rstd = 1 / sqrt(sum x^2 + eps) over the last dimension.
template <typename Int>
struct L2Norm {
  static constexpr const char* kSchema =
      "l2norm(Tensor x, float eps=1e-6, bool return_rstd=False) -> (Tensor y, Tensor rstd)";

  Tensor x;
  double eps;
  bool return_rstd;

  auto arguments() { return std::tie(x, eps, return_rstd); }

  void check(const char* op) const {
    const Check<Int> check(op, "x", x);
    check.is_rows("x", x);
    check.value(eps >= 0, "eps", "a non-negative number", eps);
  }

  std::tuple<Tensor, Tensor> outputs() const {
    const auto sizes = sizes_of<Int>(x);
    const auto float32 = x.options().dtype(at::kFloat);
    return {empty(sizes, x.options()), empty_if(return_rstd, sizes.slice(0, sizes.size() - 1), float32)};
  }

  // Finishes a call whose y has no elements: the factor of each row is that of a sum of 0. Returns whether it did.
  bool finish_without_elements(const Tensor& y, const Tensor& rstd) const {
    if (y.numel() != 0) return false;
    rstd.fill_(1 / std::sqrt(eps));
    return true;
  }
};

// Computes y = h / sqrt(mean h^2 + eps) * weight over the last dimension. h = x + residual, in f32, is the second
// output. With zero_centered, the factor is 1 + weight. With round_norm, the op rounds to x's dtype before it
// multiplies by the weight.
template <typename Int>
struct RmsNorm {
  static constexpr const char* kSchema =
      "rms_norm(Tensor x, Tensor? weight=None, Tensor? residual=None, float eps=1e-6, bool zero_centered=False, "
      "bool round_norm=False) -> (Tensor y, Tensor residual_out)";

  Tensor x;
  optional<Tensor> weight, residual;
  double eps;
  bool zero_centered, round_norm;

  Int D = 0;

  auto arguments() { return std::tie(x, weight, residual, eps, zero_centered, round_norm); }

  void check(const char* op) {
    const Check<Int> check(op, "x", x);
    D = check_rows<Int>(check, x, weight, eps);
    if (residual.has_value()) check.like("residual", *residual, "x", x);
    check.value(weight.has_value() || !zero_centered, "zero_centered", "False when there is no weight", "True");
  }

  std::tuple<Tensor, Tensor> outputs() const {
    return {empty(sizes_of<Int>(x), x.options()), empty_if(residual.has_value(), sizes_of<Int>(x), x.options())};
  }
};

// Computes x / sqrt(mean x^2 + eps) * weight * silu(g), or sigmoid(g), over the last dimension. With round_norm, the op
// rounds to x's dtype before it multiplies by the weight.
template <typename Int>
struct RmsNormGated {
  static constexpr const char* kSchema =
      "rms_norm_gated(Tensor x, Tensor g, Tensor? weight=None, str activation='silu', float eps=1e-6, "
      "bool round_norm=False) -> Tensor";

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
    D = check_rows<Int>(check, x, weight, eps);
    check.is_activation("g", g);
    check.same_shape("g", g, "x", x);
    check_activation(check, "activation", activation);
  }

  Tensor outputs() const { return empty(sizes_of<Int>(x), x.options()); }
};

// Prepares the heads of q and k for attention. If there are weights, it applies the RMS norm of each head. It then
// rotates the head's first 2 P elements in pairs (i, i + P) by the token's angles, whose cosines and sines are inputs.
// It computes in f32 and rounds once.
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
    check.like("sin", sin, "cos", cos);
  }

  Tensor output(const Tensor& x) const {
    const Int heads = size_of<Int>(x, 2);
    return heads_first ? empty({B, heads, T, D}, x.options()) : empty({B, T, heads, D}, x.options());
  }
};

// The gradients of rms_norm, rms_norm_gated and l2norm. With n = x rstd, a row's output is n (weight + offset) act(g),
// and dh is the gradient of the sum that rms_norm normalised, which is x here. rstd has the mean of x^2, or the sum
// with `over_sum`. Roundings of the forward count as identities.
template <typename Int>
struct NormBwd {
  static constexpr const char* kSchema =
      "norm_bwd(Tensor dy, Tensor x, Tensor? weight=None, Tensor? g=None, Tensor? dh=None, str activation='silu', "
      "float eps=1e-6, bool zero_centered=False, bool over_sum=False, bool output_dweight=True) -> "
      "(Tensor dx, Tensor dg, Tensor dweight)";

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
    D = check_rows<Int>(check, x, weight, eps);
    check.like("x", x, "dy", dy);
    if (g.has_value()) check.is_activation("g", *g), check.same_shape("g", *g, "dy", dy);
    if (dh.has_value()) check.like("dh", *dh, "dy", dy);
    check_activation(check, "activation", activation);
    check.value(weight.has_value() || !zero_centered, "zero_centered", "False when there is no weight", "True");
  }

  std::tuple<Tensor, Tensor, Tensor> outputs() const {
    return {empty(sizes_of<Int>(x), x.options()), empty_if(g.has_value(), sizes_of<Int>(x), g.value_or(x).options()),
            empty_if<Int>(has_dweight(), {D}, weight.value_or(x).options())};
  }
};

}  // namespace torch_gdn
