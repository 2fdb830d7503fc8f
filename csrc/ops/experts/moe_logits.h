// Computes router_logits = x W^T. Products, sums and logits are f32, whatever x's dtype is.
#pragma once
#include "ops/experts/experts.h"

namespace torch_gdn {

template <typename Int>
struct MoeLogits {
  static constexpr const char* kSchema = "moe_logits(Tensor x, Tensor weight) -> Tensor";

  Tensor x, weight;

  Int T = 0, D = 0, E = 0;

  auto arguments() { return std::tie(x, weight); }

  void check(const char* op) {
    const Check<Int> check(op, "x", x);
    check.is_activation("x", x).dimensions(2, "[T, D]");
    T = size_of<Int>(x, 0), D = size_of<Int>(x, 1);
    check.value(sym_ge(D, Int(1)), "x", "at least one column", D);
    check.dimensions("weight", weight, 2, "[E, D]");
    E = size_of<Int>(weight, 0);
    check.value(sym_ge(E, Int(1)), "weight", "at least one expert", E);
    const optional<Tensor> none;
    check_weight<Int>(check, {{"weight", "", ""}, weight, none, none}, "x", x, "[E, D]", {E}, D);
  }

  Tensor outputs() const { return empty<Int>({T, E}, x.options().dtype(at::kFloat)); }
};

}  // namespace torch_gdn
