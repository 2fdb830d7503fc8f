// Groups the pairs of a token and an expert by expert.
#pragma once
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <map>
#include <vector>

#include "cpu/quantized/dequantized.h"
#include "ops/indices.h"

namespace torch_gdn::cpu {

// Returns pairs t k + j of topk_ids [T, k], grouped by expert in ascending order. Pairs with a negative id are skipped.
inline std::map<int64_t, Tensor> pairs_of_experts(const Tensor& topk_ids) {
  std::map<int64_t, std::vector<int64_t>> pairs;
  for_each_index(topk_ids, [&](int64_t id, int64_t pair) {
    if (id >= 0) pairs[id].push_back(pair);
  });
  std::map<int64_t, Tensor> rows_by_expert;
  for (const auto& [id, expert_pairs] : pairs) {
    Tensor& rows = rows_by_expert[id] = at::empty({int64_t(expert_pairs.size())}, at::kLong);
    std::copy(expert_pairs.begin(), expert_pairs.end(), rows.mutable_data_ptr<int64_t>());
  }
  return rows_by_expert;
}

// Returns the f32 weights of one expert, or of the shared expert if `expert` is absent.
inline Tensor weights_of(const Tensor& weight, const optional<Tensor>& scales, const optional<Tensor>& biases,
                         const Packing& packing, optional<int64_t> expert = {}) {
  const auto own = [&](const Tensor& x) { return expert.has_value() ? x.select(0, *expert) : x; };
  if (packing.bits == 0) return own(weight).to(at::kFloat);
  return dequantized(own(weight), own(*scales), biases.has_value() ? optional(own(*biases)) : std::nullopt, packing);
}

// Returns x W^T in f32. On the CPU, PyTorch has no product of 16-bit matrices with an f32 result.
inline Tensor multiply(const Tensor& x, const Tensor& weight) { return at::mm(x.to(at::kFloat), weight.t()); }

}  // namespace torch_gdn::cpu
