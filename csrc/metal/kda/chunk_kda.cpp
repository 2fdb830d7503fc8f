// By the recurrent kernel, with g as the decays of key channels.
#include "ops/kda/chunk_kda.h"

#include "metal/gdn/launches.h"
#include "metal/implement.h"

namespace torch_gdn {

namespace {

void run_recurrent(const ChunkedKda<int64_t>& op, const StateIo& states, const Tensor& o) {
  TORCH_CHECK_NOT_IMPLEMENTED(!op.return_intermediate_states,
                              "chunk_kda: return_intermediate_states: expected False on mps, got True");
  const ChannelDecays channels{.gk = channel_decays(op.shape, op.required_g, op.channel_gate), .gv = std::nullopt};
  launcher().run({launch_fused_recurrent_gated_delta_rule(rule_inputs(op), channels, states, o)});
}

void run(const ChunkKda<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto& [o, final_state, h] = outputs;
  if (op.shape.T == 0) {
    h.zero_();
    copy_state(op.initial_state, final_state);
    return;
  }
  run_recurrent(op, state_io(op.initial_state, final_state, op.state_v_first), o);
}

void run_in_place(const ChunkKdaInPlace<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  run_recurrent(op, state_io(op.q.device(), op.pool, op.state_v_first), op.out.value_or(std::get<0>(outputs)));
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  metal::implement<ChunkKda, &run>(m);
  metal::implement<ChunkKdaInPlace, &run_in_place>(m);
}

}  // namespace torch_gdn
