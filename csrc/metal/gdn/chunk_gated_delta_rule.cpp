// Prefill by one of three algorithms (metal/prefill.h).
#include "ops/gdn/chunk_gated_delta_rule.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "metal/gdn/choose_prefill.h"
#include "metal/gdn/launches.h"
#include "metal/implement.h"

namespace torch_gdn {

namespace {

using Rule = ChunkedRule<int64_t>;

void run_chunked(const Rule& op, const StateIo& states, const Tensor& o, const Tensor& h_output) {
  const auto& s = op.shape;
  auto in = rule_inputs(op);
  std::vector<Launch> launches = normalise_keys(in);
  const auto options = op.intermediate_options();
  const auto g_cumsum = at::empty({s.B, s.T, s.HV}, options.dtype(at::kFloat));
  const auto w = at::empty({s.B, s.T, s.HV, s.K}, options);
  const auto u = at::empty({s.B, s.T, s.HV, s.V}, options), v_new = at::empty_like(u);
  const auto h = h_output.dim() > 1 ? h_output : at::empty(state_sizes({s.B, s.NT}, s, op.state_v_first), options);
  launches.push_back(launch_chunk_fwd_intra(in, g_cumsum, w, u));
  launches.push_back(launch_chunk_fwd_h({.shape = s,
                                         .k = in.k,
                                         .w = w,
                                         .u = u,
                                         .g_cumsum = g_cumsum,
                                         .cu_seqlens = in.cu_seqlens,
                                         .states = states,
                                         .h = h,
                                         .v_new = v_new}));
  launches.push_back(launch_chunk_fwd_o({.shape = s,
                                         .q = in.q,
                                         .k = in.k,
                                         .v_new = v_new,
                                         .h = h,
                                         .g_cumsum = g_cumsum,
                                         .cu_seqlens = in.cu_seqlens,
                                         .slots = states.slots,
                                         .v_first = op.state_v_first,
                                         .scale = in.scale,
                                         .o = o}));
  launcher().run(launches);
}

// The kernels have one dtype for q, k and v: float32 where they differ.
template <typename Op>
Op in_one_dtype(Op op) {
  if (op.has_one_dtype()) return op;
  for (Tensor* x : {&op.q, &op.k, &op.v}) *x = x->to(at::kFloat);
  return op;
}

void run_algorithm(const Rule& op, const StateIo& states, const Tensor& o, const Tensor& h) {
  const auto [algorithm, chunk_size] = choose_prefill(op);
  switch (algorithm) {
    case PrefillAlgorithm::kChunked:
      return run_chunked(op, states, o, h);
    case PrefillAlgorithm::kFusedChunk:
      return launcher().run({launch_fused_chunk_gated_delta_rule(rule_inputs(op), chunk_size, states, o)});
    case PrefillAlgorithm::kRecurrent:
      return launcher().run({launch_fused_recurrent_gated_delta_rule(rule_inputs(op), {}, states, o)});
  }
}

// The kernels write o in the dtype of q or in float32.
void run_prefill(const Rule& op, const StateIo& states, const Tensor& o, const Tensor& h) {
  const auto dtype = o.scalar_type();
  if (dtype == op.q.scalar_type() || dtype == at::kFloat) return run_algorithm(op, states, o, h);
  const auto in_float32 = at::empty(o.sizes(), o.options().dtype(at::kFloat));
  metal::prepare_output(in_float32);
  run_algorithm(op, states, in_float32, h);
  o.copy_(in_float32);
}

// Without tokens: zeros in slots without has_initial_state.
void reset_states(const Rule& op, const StateIo& states) {
  auto s = op.shape;
  s.packed = false;
  s.NT = 0;
  const auto options = op.intermediate_options();
  const auto values = at::empty({s.B, 0, s.HV, s.V}, options), keys = at::empty({s.B, 0, s.HV, s.K}, options);
  launcher().run({launch_chunk_fwd_h({.shape = s,
                                      .k = op.q,
                                      .w = keys,
                                      .u = values,
                                      .g_cumsum = at::empty({s.B, 0, s.HV}, options.dtype(at::kFloat)),
                                      .cu_seqlens = std::nullopt,
                                      .states = states,
                                      .h = values,
                                      .v_new = values})});
}

void run(const ChunkGatedDeltaRule<int64_t>& call, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto op = in_one_dtype(call);
  const auto& [o, final_state, h] = outputs;
  if (op.shape.T == 0) {
    h.zero_();
    copy_state(op.initial_state, final_state);
    return;
  }
  run_prefill(op, state_io(op.initial_state, final_state, op.state_v_first), o, h);
}

void run_in_place(const ChunkGatedDeltaRuleInPlace<int64_t>& call, const std::tuple<Tensor, Tensor>& outputs) {
  const auto op = in_one_dtype(call);
  const auto& [new_o, h] = outputs;
  const Tensor o = op.out.value_or(new_o);
  const auto states = state_io(op.q.device(), op.pool, op.state_v_first);
  if (op.shape.T == 0) {
    h.zero_();
    reset_states(op, states);
    return;
  }
  run_prefill(op, states, o, h);
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  metal::implement<ChunkGatedDeltaRule, &run>(m);
  metal::implement<ChunkGatedDeltaRuleInPlace, &run_in_place>(m);
}

}  // namespace torch_gdn
