// Chooses each token's experts and their weights. The score is softmax(logits) or sigmoid(logits), in f32. The experts
// with the top_k highest values of score + correction_bias are chosen, the highest first. The lower id wins a tie. A
// weight is the score, without the bias. With groups, only the experts of the topk_group best groups can be chosen. The
// value of a group is the sum of its two highest values with a bias, and its highest value without one.
#pragma once
#include <string_view>

#include "ops/op.h"

namespace torch_gdn {

template <typename Int>
struct MoeRouter {
  static constexpr const char* kSchema =
      "moe_router(Tensor router_logits, int top_k, str scoring='softmax', Tensor? correction_bias=None, int n_group=1, "
      "int topk_group=1, bool renormalize=True, float routed_scaling_factor=1.0) -> "
      "(Tensor topk_weights, Tensor topk_ids)";

  static constexpr int64_t kMostExperts = 1024, kMostGroups = 32, kMostChosen = 32;

  Tensor router_logits;
  int64_t top_k;
  std::string_view scoring;
  optional<Tensor> correction_bias;
  int64_t n_group, topk_group;
  bool renormalize;
  double routed_scaling_factor;

  Int T = 0, E = 0;

  auto arguments() {
    return std::tie(router_logits, top_k, scoring, correction_bias, n_group, topk_group, renormalize,
                    routed_scaling_factor);
  }

  bool has_sigmoid() const { return scoring == "sigmoid"; }

  void check(const char* op) {
    const Check<Int> check(op, "router_logits", router_logits);
    check.is_activation("router_logits", router_logits).dimensions(2, "[T, E]");
    T = size_of<Int>(router_logits, 0), E = size_of<Int>(router_logits, 1);
    check.in_range("router_logits", "1 to 1024 experts", E, 1, kMostExperts);
    check.value(scoring == "softmax" || has_sigmoid(), "scoring", "'softmax' or 'sigmoid'", "'", scoring, "'");
    check.value(n_group >= 1 && n_group <= kMostGroups, "n_group", "1 to 32", n_group);
    check.value(sym_eq(E % Int(n_group), Int(0)), "n_group", "a divisor of the number of experts", n_group, " for ", E);
    check.value(topk_group >= 1 && topk_group <= n_group, "topk_group", "1 to n_group", topk_group, " of ", n_group);
    check.value(top_k >= 1 && top_k <= kMostChosen, "top_k", "1 to 32", top_k);
    check.value(sym_le(Int(top_k), E / Int(n_group) * Int(topk_group)), "top_k",
                "at most the experts that can be chosen", top_k);
    check.value(std::isfinite(routed_scaling_factor), "routed_scaling_factor", "a finite number",
                routed_scaling_factor);
    if (!correction_bias.has_value()) return;
    check.is_activation("correction_bias", *correction_bias).dimensions(1, "[E]");
    const Int size = size_of<Int>(*correction_bias, 0);
    check.value(sym_eq(size, E), "correction_bias", "one value per expert", size, " for ", E, " experts");
  }

  std::tuple<Tensor, Tensor> outputs() const {
    const auto options = router_logits.options();
    return {empty<Int>({T, Int(top_k)}, options.dtype(at::kFloat)),
            empty<Int>({T, Int(top_k)}, options.dtype(at::kInt))};
  }
};

}  // namespace torch_gdn
