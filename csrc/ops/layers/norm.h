#pragma once
#include "ops/op.h"

namespace torch_gdn {

// What the norms ask of their rows; how long those are.
template <typename Int>
Int check_rows(const Check<Int>& check, const Tensor& x, const optional<Tensor>& weight, double eps,
               const char* expected, int64_t largest_row) {
  check.is_activation("x", x);
  check.at_least_one_dimension("x", x);
  const Int D = size_of<Int>(x, -1);
  check.in_range("x", expected, D, 1, largest_row);
  if (weight.has_value()) {
    check.is_activation("weight", *weight);
    check.shape("weight", *weight, "[D]", {D});
  }
  check.value(eps >= 0, "eps", "a number that is not negative", eps);
  return D;
}

}  // namespace torch_gdn
