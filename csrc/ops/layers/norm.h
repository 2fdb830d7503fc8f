#pragma once
#include "ops/op.h"

namespace torch_gdn {

// Checks the rows of a norm and returns their length.
template <typename Int>
Int check_rows(const Check<Int>& check, const Tensor& x, const optional<Tensor>& weight, double eps,
               const char* expected, int64_t largest_row) {
  check.is_activation("x", x);
  check.at_least_one_dimension("x", x);
  const Int D = size_of<Int>(x, -1);
  check.in_range("x", expected, D, 1, largest_row);
  if (weight.has_value()) check.is_activation("weight", *weight).shape("[D]", {D});
  check.value(eps >= 0, "eps", "a non-negative number", eps);
  return D;
}

}  // namespace torch_gdn
