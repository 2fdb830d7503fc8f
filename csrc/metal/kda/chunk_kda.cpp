// Prefill by one of three algorithms (metal/prefill.h).
#include "ops/kda/chunk_kda.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "metal/gdn/choose_prefill.h"
#include "metal/implement.h"
#include "metal/kda/launches.h"

namespace torch_gdn {

namespace {

using Rule = ChunkedKda<int64_t>;

Launch recurrent_launch(const Rule& op, const StateIo& states, const Tensor& o) {
  const ChannelDecays channels{.gk = op.required_g, .gv = std::nullopt, .gate = op.channel_gate};
  return launch_fused_recurrent_gated_delta_rule(rule_inputs(op), channels, states, o);
}

std::vector<Launch> chunked_launches(const Rule& op, const StateIo& states, const Tensor& o, const Tensor& h_output) {
  const auto& s = op.shape;
  auto in = rule_inputs(op);
  std::vector<Launch> launches = normalise_keys(in);
  const auto options = op.intermediate_options();
  const auto decayed_q = at::empty({s.B, s.T, s.HV, s.K}, in.q.options());
  const KdaChunk chunk{.decayed_q = decayed_q,
                       .decayed_k = at::empty_like(decayed_q),
                       .scores = at::empty({s.B, s.T, s.HV, s.C}, options.dtype(at::kFloat)),
                       .log_decays = at::empty({s.B, s.NT, s.HV, s.K}, options.dtype(at::kFloat)),
                       .w = at::empty({s.B, s.T, s.HV, s.K}, options),
                       .u = at::empty({s.B, s.T, s.HV, s.V}, options)};
  const auto v_new = at::empty_like(chunk.u);
  const auto h = h_output.dim() > 1 ? h_output : at::empty(state_sizes({s.B, s.NT}, s, op.state_v_first), options);
  auto value_heads = s;  // what is decayed has a head each
  value_heads.H = s.HV;
  launches.push_back(launch_kda_chunk_fwd_intra(in, channel_gates_of(op.required_g, "g", op.channel_gate), chunk));
  launches.push_back(launch_chunk_fwd_h({.shape = value_heads,
                                         .k = chunk.decayed_k,
                                         .w = chunk.w,
                                         .u = chunk.u,
                                         .g_cumsum = chunk.log_decays,
                                         .cu_seqlens = in.cu_seqlens,
                                         .states = states,
                                         .h = h,
                                         .v_new = v_new,
                                         .has_channel_decays = true}));
  launches.push_back(launch_chunk_fwd_o({.shape = value_heads,
                                         .q = chunk.decayed_q,
                                         .k = chunk.scores,
                                         .v_new = v_new,
                                         .h = h,
                                         .g_cumsum = chunk.log_decays,
                                         .cu_seqlens = in.cu_seqlens,
                                         .slots = states.slots,
                                         .v_first = op.state_v_first,
                                         .scale = in.scale,
                                         .o = o,
                                         .has_scores = true}));
  return launches;
}

std::vector<Launch> prefill_launches(const Rule& op, const StateIo& states, const Tensor& o, const Tensor& h) {
  const auto [algorithm, chunk_size] = choose_prefill(op, /*has_channel_decays=*/true);
  if (op.shape.T == 0 || algorithm == PrefillAlgorithm::kRecurrent) return {recurrent_launch(op, states, o)};
  if (algorithm == PrefillAlgorithm::kChunked) return chunked_launches(op, states, o, h);
  return {launch_fused_chunk_kda(rule_inputs(op), channel_gates_of(op.required_g, "g", op.channel_gate), chunk_size,
                                 states, o)};
}

void run_prefill(const Rule& op, const StateIo& states, const Tensor& o, const Tensor& h) {
  launcher().run(prefill_launches(op, states, o, h));
}

void run(const ChunkKda<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto& [o, final_state, h] = outputs;
  if (op.shape.T == 0) {
    h.zero_();
    copy_state(op.initial_state, final_state);
    return;
  }
  run_prefill(op, state_io(op.initial_state, final_state, op.state_v_first), o, h);
}

void run_in_place(const ChunkKdaInPlace<int64_t>& op, const Tensor& o) {
  run_prefill(op, state_io(op.q.device(), op.pool, op.state_v_first), op.out.value_or(o), op.chunk_states());
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  metal::implement<ChunkKda, &run>(m);
  metal::implement<ChunkKdaInPlace, &run_in_place>(m);
}

}  // namespace torch_gdn
