// x / sqrt(sum x^2 + eps) over the last dimension.
#pragma once
#include "ops/op.h"

namespace torch_gdn {

template <typename Int>
struct L2Norm {
  static constexpr const char* kSchema = "l2norm(Tensor x, float eps=1e-6) -> Tensor";

  Tensor x;
  double eps;

  auto arguments() { return std::tie(x, eps); }

  void check() const {
    const Check<Int> check("l2norm", "x", x);
    check.is_activation("x", x);
    check.at_least_one_dimension("x", x);
    check.value(eps >= 0, "eps", "a number that is not negative", eps);
  }

  Tensor outputs() const { return empty(sizes_of<Int>(x), x.options()); }
};

}  // namespace torch_gdn
