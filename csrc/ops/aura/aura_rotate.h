// Computes scale Pi x, or scale Pi^T x if `inverse`, for each vector x.
#pragma once
#include "ops/aura/aura.h"

namespace torch_gdn {

template <typename Int>
struct AuraRotate {
  static constexpr const char* kSchema =
      "aura_rotate(Tensor x, Tensor signs, float scale=1.0, bool inverse=False) -> Tensor";

  Tensor x, signs;
  double scale;
  bool inverse;

  auto arguments() { return std::tie(x, signs, scale, inverse); }

  void check(const char* op) const {
    const Check<Int> check(op, "x", x);
    check.is_activation("x", x);
    check.at_least_one_dimension("x", x);
    check_table(check, "signs", signs, "[D]", check_head_size(check, "x", size_of<Int>(x, -1)));
  }

  Tensor outputs() const { return empty(sizes_of<Int>(x), x.options().dtype(at::kFloat)); }
};

}  // namespace torch_gdn
