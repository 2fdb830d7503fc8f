// The products of mixtures of experts, expert by expert.
#include <ATen/ops/mm.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <map>
#include <vector>

#include "cpu/define.h"
#include "cpu/quantized/dequantized.h"
#include "ops/experts/experts.h"
#include "ops/indices.h"

namespace torch_gdn::cpu {
namespace {

// Returns pairs t k + j of topk_ids [T, k], grouped by expert in ascending order. Pairs with a negative id are skipped.
std::map<int64_t, Tensor> pairs_of_experts(const Tensor& topk_ids) {
  std::map<int64_t, std::vector<int64_t>> pairs;
  for_each_index(topk_ids, [&](int64_t id, int64_t pair) {
    if (id >= 0) pairs[id].push_back(pair);
  });
  std::map<int64_t, Tensor> rows_by_expert;
  for (const auto& [id, expert_pairs] : pairs) rows_by_expert[id] = at::tensor(expert_pairs, at::kLong);
  return rows_by_expert;
}

// Returns the f32 weights of one expert, or of the shared expert if `expert` is absent.
Tensor weights_of(const Tensor& weight, const optional<Tensor>& scales, const optional<Tensor>& biases,
                  const Packing& packing, optional<int64_t> expert = {}) {
  const auto own = [&](const Tensor& x) { return expert.has_value() ? x.select(0, *expert) : x; };
  if (packing.bits == 0) return own(weight).to(at::kFloat);
  return dequantized(own(weight), own(*scales), biases.has_value() ? optional(own(*biases)) : std::nullopt, packing);
}

// Returns x W^T in f32. On the CPU, PyTorch has no product of 16-bit matrices with an f32 result.
Tensor multiply(const Tensor& x, const Tensor& weight) { return at::mm(x.to(at::kFloat), weight.t()); }

void run(const MoeLogits<int64_t>& op, const Tensor& router_logits) {
  router_logits.copy_(multiply(op.x, op.weight.to(at::kFloat)));
}

Tensor activated(const Tensor& gate, const Tensor& up, at::ScalarType dtype) {
  return at::silu(gate).mul_(up).to(dtype);
}

void run(const MoeGateUp<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [hidden, shared_hidden] = outputs;
  const auto& s = op.shape;
  if (s.T == 0) return;
  Tensor rows = hidden.view({s.T * s.k, s.I});
  rows.zero_();
  for (const auto& [expert, pairs] : pairs_of_experts(op.topk_ids)) {
    const Tensor x = op.x.index_select(0, pairs.floor_divide(s.k));
    const Tensor both = multiply(x, weights_of(op.w_gate_up, op.w_scales, op.w_biases, op.packing, expert));
    rows.index_copy_(0, pairs, activated(both.narrow(1, 0, s.I), both.narrow(1, s.I, s.I), x.scalar_type()));
  }
  if (!op.shared_gate_proj.has_value()) return;
  const Tensor gate = weights_of(*op.shared_gate_proj, op.shared_gate_scales, op.shared_gate_biases, op.shared_packing);
  const Tensor up = weights_of(*op.shared_up_proj, op.shared_up_scales, op.shared_up_biases, op.shared_packing);
  shared_hidden.copy_(activated(multiply(op.x, gate), multiply(op.x, up), op.x.scalar_type()));
}

void run(const MoeDown<int64_t>& op, const Tensor& y) {
  const auto& s = op.shape;
  if (s.T == 0) return;
  const Tensor hidden = op.hidden.reshape({s.T * s.k, s.I});
  const Tensor weights = op.topk_weights.to(at::kFloat).reshape({s.T * s.k, 1});
  Tensor sum = at::zeros({s.T, s.D}, at::kFloat);
  for (const auto& [expert, pairs] : pairs_of_experts(op.topk_ids)) {
    const Tensor matrix = weights_of(op.w_down, op.w_scales, op.w_biases, op.packing, expert);
    const Tensor product = multiply(hidden.index_select(0, pairs), matrix);
    sum.index_add_(0, pairs.floor_divide(s.k), product.mul_(weights.index_select(0, pairs)));
  }
  if (op.shared_hidden.has_value()) {
    const Tensor matrix = weights_of(*op.shared_down_proj, op.shared_scales, op.shared_biases, op.shared_packing);
    Tensor product = multiply(*op.shared_hidden, matrix);
    if (op.shared_gate.has_value()) product.mul_(op.shared_gate->to(at::kFloat).sigmoid());
    sum.add_(product);
  }
  if (op.residual.has_value()) sum.add_(*op.residual);
  y.copy_(sum);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) {
  define<MoeLogits, &run>(m);
  define<MoeGateUp, &run>(m);
  define<MoeDown, &run>(m);
}

}  // namespace torch_gdn::cpu
