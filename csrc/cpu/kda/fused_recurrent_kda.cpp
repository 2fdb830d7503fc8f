#include "ops/kda/fused_recurrent_kda.h"

#include "cpu/define.h"
#include "cpu/gdn/recurrence.h"

namespace torch_gdn {

namespace {

void run(const FusedRecurrentKda<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [o, final_state] = outputs;
  cpu::run_recurrence(op, op.channels,
                      cpu::StateIo::of_sequences(op.shape, op.initial_state, final_state, op.state_v_first), o);
}

void run_in_place(const FusedRecurrentKdaInPlace<int64_t>& op, const Tensor& o) {
  cpu::run_recurrence(op, op.channels, cpu::StateIo::in_place(op.shape, op.pool, op.state_v_first), op.out.value_or(o));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gdn, m) {
  cpu::define<FusedRecurrentKda, &run>(m);
  cpu::define<FusedRecurrentKdaInPlace, &run_in_place>(m);
}

}  // namespace torch_gdn
