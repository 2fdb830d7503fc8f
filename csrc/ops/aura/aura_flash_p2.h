// Pass 2 of attention to codes merges the blocks and rotates the result back.
#pragma once
#include "ops/aura/aura.h"

namespace torch_gdn {

template <typename Int>
struct AuraFlashP2 {
  static constexpr const char* kSchema =
      "aura_flash_p2(Tensor o_partials, Tensor m_partials, Tensor l_partials, Tensor value_signs, "
      "Tensor? sinks=None, ScalarType? dtype=None) -> Tensor";

  Tensor o_partials, m_partials, l_partials, value_signs;
  optional<Tensor> sinks;
  optional<at::ScalarType> dtype;

  AuraShape<Int> shape;

  auto arguments() { return std::tie(o_partials, m_partials, l_partials, value_signs, sinks, dtype); }

  void check(const char* op) {
    const Check<Int> check(op, "o_partials", o_partials);
    check.is_float32("o_partials", o_partials).dimensions(5, "[B, HQ, L, NB, D]");
    auto& s = shape;
    s.B = size_of<Int>(o_partials, 0), s.HQ = size_of<Int>(o_partials, 1), s.L = size_of<Int>(o_partials, 2);
    s.NB = size_of<Int>(o_partials, 3);
    s.D = check_head_size(check, "o_partials", size_of<Int>(o_partials, 4));
    check_rows(check, "m_partials", m_partials);
    check_rows(check, "l_partials", l_partials);
    check_table(check, "value_signs", value_signs, "[D]", s.D);
    if (sinks.has_value()) check_table(check, "sinks", *sinks, "[HQ]", s.HQ);
    check.is_activation("dtype", dtype.value_or(at::kFloat));
  }

  Tensor outputs() const {
    return empty<Int>({shape.B, shape.HQ, shape.L, shape.D}, o_partials.options().dtype(dtype.value_or(at::kFloat)));
  }

 private:
  void check_rows(const Check<Int>& check, const char* argument, const Tensor& x) const {
    check.is_float32(argument, x).shape("[B, HQ, L, NB]", {shape.B, shape.HQ, shape.L, shape.NB});
  }
};

}  // namespace torch_gdn
