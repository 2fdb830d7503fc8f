// What the gated norm accepts: checks.h, for its op.
#pragma once
#include <string_view>

#include "ops/check.h"

namespace torch_gdn {

constexpr int64_t kLargestRow = 1024;

struct GatedNormShape {
  int64_t D = 0, rows = 0;
  bool sigmoid = false;        // else silu
  bool round_product = false;  // the product with the weight, where it is rounded too
};

inline GatedNormShape check_rms_norm_gated(const Tensor& x, const Tensor& g, const optional<Tensor>& weight, double eps,
                                           std::string_view activation, bool round_norm) {
  const Check check("rms_norm_gated", "x", x);
  check.is_activation("x", x);
  check.value(x.dim() >= 1, "x", "at least one dimension", x.dim());
  GatedNormShape s{.D = x.size(-1)};
  check.value(s.D >= 1 && s.D <= kLargestRow, "x", "a last dimension from 1 to 1024", s.D);
  check.is_activation("g", g);
  check.value(g.sizes() == x.sizes(), "g", "the shape of x", g.sizes(), " for ", x.sizes());
  check.on_device("g", g);
  if (weight.has_value()) {
    check.is_activation("weight", *weight);
    check.shape("weight", *weight, "[D]", {s.D});
    s.round_product = round_norm && weight->scalar_type() == x.scalar_type();
  }
  check.value(eps >= 0, "eps", "a number that is not negative", eps);
  check.value(activation == "silu" || activation == "swish" || activation == "sigmoid", "activation",
              "'silu', 'swish' or 'sigmoid'", activation);
  s.sigmoid = activation == "sigmoid";
  s.rows = x.numel() / s.D;
  return s;
}

}  // namespace torch_gdn
