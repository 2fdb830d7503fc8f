#include "ops/layers/act_and_mul.h"

#include "metal/implement.h"
#include "metal/layers/rows.h"
#include "shaders/layers/act_and_mul.h"

namespace torch_gdn {

namespace {

Launch launch_act_and_mul(const ActAndMul<int64_t>& op, const Tensor& gate, const Tensor& up, const Tensor& y) {
  const int64_t D = gate.size(3);
  auto parameters = row_parameters<ActAndMulParameters>(gate, "act_and_mul: gate");
  parameters.up = row_strides(up);
  parameters.D = int32_count(D, "act_and_mul: gate", "elements in a row");
  parameters.has_sigmoid = op.has_sigmoid();
  const int width = vector_width({gate, up});
  parameters.threads = int32_t(std::min<int64_t>(kActAndMulMostThreads, ceil_div(ceil_div(D, width), 32) * 32));
  return {"layers/act_and_mul",
          {gate.scalar_type(), width},
          {gate, up, y, parameters},
          {parameters.rows, ceil_div(D, int64_t(parameters.threads) * width), 1},
          parameters.threads};
}

void run(const ActAndMul<int64_t>& op, const Tensor& y) {
  if (y.numel() == 0) return;
  launcher().run({launch_act_and_mul(op, as_rows(op.gate, "gate"), as_rows(op.up, "up"), y)});
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { metal::implement<ActAndMul, &run>(m); }

}  // namespace torch_gdn
