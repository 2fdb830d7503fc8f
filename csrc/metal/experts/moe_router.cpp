#include "ops/experts/moe_router.h"

#include <bit>

#include "metal/gates.h"
#include "metal/implement.h"
#include "shaders/experts/moe_router.h"

namespace torch_gdn {

namespace {

void run(const MoeRouter<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [topk_weights, topk_ids] = outputs;
  const Tensor logits = unit_last_stride(op.router_logits, "router_logits");
  const auto bias = contiguous(op.correction_bias);
  MoeRouterParameters parameters{};
  parameters.logits_stride = logits.stride(0);
  parameters.tokens = int32_count(op.T, "moe_router: router_logits", "tokens");
  parameters.experts = int32_t(op.E);
  parameters.top_k = int32_t(op.top_k);
  parameters.groups = int32_t(op.n_group);
  parameters.open_groups = int32_t(op.topk_group);
  parameters.group_size = int32_t(op.E / op.n_group);
  parameters.bias_type = bias.has_value() ? element_type(*bias) : kAbsent;
  parameters.has_sigmoid = op.has_sigmoid();
  parameters.renormalize = op.renormalize;
  parameters.scale = float(op.routed_scaling_factor);
  const auto experts_per_lane = std::bit_ceil(uint64_t(ceil_div(op.E, 32)));
  launcher().run({{"experts/moe_router",
                   {logits.scalar_type(), experts_per_lane},
                   {logits, bias, topk_weights, topk_ids, parameters},
                   {op.T, 1, 1},
                   32}});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<MoeRouter, &run>(m); }

}  // namespace torch_gdn
