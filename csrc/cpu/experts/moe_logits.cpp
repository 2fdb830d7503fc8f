#include "ops/experts/moe_logits.h"

#include "cpu/define.h"
#include "cpu/experts/groups.h"

namespace torch_gdn {
namespace {

void run(const MoeLogits<int64_t>& op, const Tensor& router_logits) {
  router_logits.copy_(cpu::multiply(op.x, op.weight.to(at::kFloat)));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { cpu::define<MoeLogits, &run>(m); }

}  // namespace torch_gdn
