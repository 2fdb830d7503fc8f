#include "cpu/define.h"
#include "cpu/layers/rotated_heads.h"
#include "ops/layers/rows.h"

namespace torch_gdn::cpu {
namespace {

void run(const QkNormRope<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto by_token = [&](const Tensor& x) { return op.heads_first ? x.transpose(1, 2) : x; };
  write_heads(op, op.q, op.q_weight, by_token(std::get<0>(outputs)));
  write_heads(op, op.k, op.k_weight, by_token(std::get<1>(outputs)));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) { define<QkNormRope, &run>(m); }

}  // namespace torch_gdn::cpu
