// Computes y = x rstd with rstd = 1 / sqrt(sum x^2 + eps) over the last dimension.
#pragma once
#include "ops/op.h"

namespace torch_gdn {

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
    check.is_activation("x", x);
    check.at_least_one_dimension("x", x);
    check.value(eps >= 0, "eps", "a non-negative number", eps);
  }

  std::tuple<Tensor, Tensor> outputs() const {
    const auto sizes = sizes_of<Int>(x);
    const auto float32 = x.options().dtype(at::kFloat);
    return {empty(sizes, x.options()),
            return_rstd ? empty(sizes.slice(0, sizes.size() - 1), float32) : no_output(float32)};
  }

  // Finishes a call whose y has no elements: the factor of each row is that of a sum of 0. Returns whether it did.
  bool finish_without_elements(const Tensor& y, const Tensor& rstd) const {
    if (y.numel() != 0) return false;
    rstd.fill_(1 / std::sqrt(eps));
    return true;
  }
};

}  // namespace torch_gdn
