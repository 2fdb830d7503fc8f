// What the gates accept: checks.h, for their op.
#pragma once
#include "ops/check.h"

namespace torch_gdn {

// HV.
inline int64_t check_gdn_gating(const Tensor& A_log, const Tensor& a, const Tensor& b, const optional<Tensor>& dt_bias,
                                bool /*allow_neg_eigval*/) {
  const Check check("gdn_gating", "A_log", A_log);
  check.is_activation("A_log", A_log);
  check.dimensions("A_log", A_log, 1, "[HV]");
  const int64_t HV = A_log.size(0);
  check.value(HV >= 1, "A_log", "at least one head", HV);
  check.is_activation("a", a);
  check.value(a.dim() >= 1 && a.size(-1) == HV, "a", "shape [..., HV] with the HV of A_log", a.sizes());
  check.on_device("a", a);
  check.is_activation("b", b);
  check.value(b.sizes() == a.sizes(), "b", "the shape of a", b.sizes(), " for ", a.sizes());
  check.on_device("b", b);
  if (dt_bias.has_value()) {
    check.is_activation("dt_bias", *dt_bias);
    check.shape("dt_bias", *dt_bias, "[HV]", {HV});
  }
  return HV;
}

}  // namespace torch_gdn
