#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/define.h"
#include "ops/experts/experts.h"

namespace torch_gdn::cpu {
namespace {

// Returns whether a is chosen before b. NaN comes first, as in torch.topk.
bool precedes(float a, float b) { return std::isnan(a) ? !std::isnan(b) : a > b; }

// Routes one token at a time.
class Router {
 public:
  Router(const MoeRouter<int64_t>& op, const float* bias)
      : op_(op), bias_(bias), scores_(op.E), values_(op.E), order_(op.E) {}

  void choose(const float* logits, float* weights, int32_t* ids) {
    score(logits);
    for (int64_t e = 0; e < op_.E; ++e) values_[e] = scores_[e] + (bias_ ? bias_[e] : 0.0f);
    candidates();
    const auto better = [&](int32_t a, int32_t b) {
      return precedes(values_[a], values_[b]) || (!precedes(values_[b], values_[a]) && a < b);
    };
    std::partial_sort(order_.begin(), order_.begin() + op_.top_k, order_.end(), better);
    float sum = 0.0f;
    for (int64_t j = 0; j < op_.top_k; ++j) sum += scores_[order_[j]];
    const float factor = float(op_.routed_scaling_factor), divisor = op_.renormalize ? sum + 1e-20f : 1.0f;
    for (int64_t j = 0; j < op_.top_k; ++j) {
      ids[j] = order_[j];
      weights[j] = scores_[order_[j]] / divisor * factor;
    }
  }

 private:
  void score(const float* logits) {
    if (op_.has_sigmoid()) {
      for (int64_t e = 0; e < op_.E; ++e) scores_[e] = 1.0f / (1.0f + std::exp(-logits[e]));
      return;
    }
    float largest = -std::numeric_limits<float>::infinity();
    double sum = 0.0;  // sums up to 1,024 scores in order
    for (int64_t e = 0; e < op_.E; ++e) largest = std::max(largest, logits[e]);
    for (int64_t e = 0; e < op_.E; ++e) sum += scores_[e] = std::exp(logits[e] - largest);
    for (int64_t e = 0; e < op_.E; ++e) scores_[e] = float(scores_[e] / sum);
  }

  // Fills order_ with the experts that can be chosen.
  void candidates() {
    order_.clear();
    const int64_t size = op_.E / op_.n_group;
    std::vector<std::pair<float, int64_t>> groups;
    for (int64_t group = 0; group < op_.n_group; ++group) groups.emplace_back(group_value(group * size, size), group);
    std::stable_sort(groups.begin(), groups.end(), [](auto& a, auto& b) { return precedes(a.first, b.first); });
    for (int64_t i = 0; i < op_.topk_group; ++i) {
      for (int64_t e = 0; e < size; ++e) order_.push_back(int32_t(groups[i].second * size + e));
    }
  }

  float group_value(int64_t first, int64_t size) const {
    float highest = values_[first], second = -std::numeric_limits<float>::infinity();
    for (int64_t e = first + 1; e < first + size; ++e) {
      if (precedes(values_[e], highest)) {
        second = highest, highest = values_[e];
      } else if (precedes(values_[e], second)) {
        second = values_[e];
      }
    }
    return bias_ && size > 1 ? highest + second : highest;
  }

  const MoeRouter<int64_t>& op_;
  const float* bias_;
  std::vector<float> scores_, values_;
  std::vector<int32_t> order_;
};

void run(const MoeRouter<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [topk_weights, topk_ids] = outputs;
  const Tensor logits = op.router_logits.to(at::kFloat).contiguous();
  const Tensor bias = op.correction_bias.has_value() ? op.correction_bias->to(at::kFloat).contiguous() : Tensor();
  const auto* in = logits.const_data_ptr<float>();
  auto* weights = topk_weights.mutable_data_ptr<float>();
  auto* ids = topk_ids.mutable_data_ptr<int32_t>();
  at::parallel_for(0, op.T, 8, [&](int64_t begin, int64_t end) {
    Router router(op, bias.defined() ? bias.const_data_ptr<float>() : nullptr);
    for (int64_t t = begin; t < end; ++t) router.choose(in + t * op.E, weights + t * op.top_k, ids + t * op.top_k);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { define<MoeRouter, &run>(m); }

}  // namespace torch_gdn::cpu
