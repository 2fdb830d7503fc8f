// Prefill by the fused chunk kernel, or token by token by the recurrent one (metal/prefill.h).
#include "ops/kda/chunk_kda.h"

#include "metal/implement.h"
#include "metal/kda/launches.h"

namespace torch_gdn {

namespace {

using Rule = ChunkedKda<int64_t>;

Launch recurrent_launch(const Rule& op, const StateIo& states, const Tensor& o) {
  const ChannelDecays channels{.gk = channel_decays(op.shape, op.required_g, op.channel_gate), .gv = std::nullopt};
  return launch_fused_recurrent_gated_delta_rule(rule_inputs(op), channels, states, o);
}

// There is no kernel a stage: where the delta rule has one, this one is fused.
void run_prefill(const Rule& op, const StateIo& states, const Tensor& o) {
  const auto [algorithm, chunk_size] = choose_prefill(op.shape);
  const bool by_token = op.shape.T == 0 || algorithm == PrefillAlgorithm::kRecurrent;
  launcher().run({by_token ? recurrent_launch(op, states, o)
                           : launch_fused_chunk_kda(rule_inputs(op), channel_gates_of(op.required_g, op.channel_gate),
                                                    chunk_size, states, o)});
}

void run(const ChunkKda<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& [o, final_state] = outputs;
  if (op.shape.T == 0) {
    copy_state(op.initial_state, final_state);
    return;
  }
  run_prefill(op, state_io(op.initial_state, final_state, op.state_v_first), o);
}

void run_in_place(const ChunkKdaInPlace<int64_t>& op, const Tensor& o) {
  run_prefill(op, state_io(op.q.device(), op.pool, op.state_v_first), op.out.value_or(o));
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  metal::implement<ChunkKda, &run>(m);
  metal::implement<ChunkKdaInPlace, &run_in_place>(m);
}

}  // namespace torch_gdn
