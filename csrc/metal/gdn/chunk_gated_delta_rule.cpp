// Runs prefill by one of three algorithms (launch/prefill.h).
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "metal/gdn/choose_prefill.h"
#include "metal/gdn/launches.h"
#include "metal/implement.h"
#include "ops/gdn/kda.h"

namespace torch_gdn {

namespace {

using Rule = ChunkedRule<int64_t>;

// Runs three kernels. The first prepares each chunk separately, the second computes the states between chunks, and the
// third the outputs.
std::vector<Launch> chunked_launches(const Rule& op, const StateIo& states, const Tensor& o, const Tensor& h_output) {
  const auto& s = op.shape;
  auto in = rule_inputs(op);
  std::vector<Launch> launches = normalise_keys(in);
  const auto options = op.intermediate_options(), in_f32 = options.dtype(at::kFloat);
  Chunks chunks{.q = in.q,
                .k = in.k,
                .w = at::empty({s.B, s.T, s.HV, s.K}, options),
                .u = at::empty({s.B, s.T, s.HV, s.V}, options)};
  if (in.gk.g.has_value()) {
    chunks.q = at::empty({s.B, s.T, s.HV, s.K}, in.q.options());
    chunks.k = at::empty_like(chunks.q);
    chunks.log_decays = at::empty({s.B, s.NT, s.HV, s.K}, in_f32);
    chunks.scores = at::empty({s.B, s.T, s.HV, s.C}, in_f32);
    launches.push_back(launch_kda_chunk_fwd_intra(in, chunks));
  } else {
    chunks.g_cumsum = at::empty({s.B, s.T, s.HV}, in_f32);
    launches.push_back(launch_chunk_fwd_intra(in, chunks));
  }
  const auto v_new = at::empty_like(chunks.u);
  const auto h = h_output.dim() > 1 ? h_output : at::empty(state_sizes({s.B, s.NT}, s, op.state_v_first), options);
  launches.push_back(launch_chunk_fwd_h(
      {.shape = s, .chunks = chunks, .cu_seqlens = in.cu_seqlens, .states = states, .h = h, .v_new = v_new}));
  launches.push_back(launch_chunk_fwd_o({.shape = s,
                                         .chunks = chunks,
                                         .v_new = v_new,
                                         .h = h,
                                         .cu_seqlens = in.cu_seqlens,
                                         .slots = states.slots,
                                         .v_first = op.state_v_first,
                                         .scale = in.scale,
                                         .o = o}));
  return launches;
}

// A call without tokens runs the recurrence, which sets states in slots without has_initial_state to zero.
std::vector<Launch> prefill_launches(const Rule& op, const StateIo& states, const Tensor& o, const Tensor& h) {
  const auto [algorithm, chunk_size] = choose_prefill(op);
  if (op.shape.T == 0 || algorithm == PrefillAlgorithm::kRecurrent) {
    return {launch_fused_recurrent_gated_delta_rule(rule_inputs(op), states, o)};
  }
  if (algorithm == PrefillAlgorithm::kChunked) return chunked_launches(op, states, o, h);
  const auto launch = op.channels.gk.has_value() ? launch_fused_chunk_kda : launch_fused_chunk_gated_delta_rule;
  return {launch(rule_inputs(op), chunk_size, states, o)};
}

// The kernels write o in the dtype of q or in float32.
void run_prefill(const Rule& op, const StateIo& states, const Tensor& o, const Tensor& h) {
  const auto dtype = o.scalar_type();
  if (dtype == op.q.scalar_type() || dtype == at::kFloat) return launcher().run(prefill_launches(op, states, o, h));
  const auto in_float32 = at::empty(o.sizes(), o.options().dtype(at::kFloat));
  metal::prepare_output(in_float32);
  launcher().run(prefill_launches(op, states, in_float32, h));
  o.copy_(in_float32);
}

// The kernels take one dtype for q, k and v: float32 if the three differ.
template <typename Op>
Op in_one_dtype(Op op) {
  if (op.has_one_dtype()) return op;
  for (Tensor* x : {&op.q, &op.k, &op.v}) *x = x->to(at::kFloat);
  return op;
}

void run(const ChunkedCall<int64_t>& call, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto op = in_one_dtype(call);
  const auto& [o, final_state, h] = outputs;
  if (op.shape.T == 0) {
    h.zero_();
    copy_state(op.initial_state, final_state);
    return;
  }
  run_prefill(op, state_io(op.initial_state, final_state, op.state_v_first), o, h);
}

void run_in_place(const ChunkedCallInPlace<int64_t>& call, const std::tuple<Tensor, Tensor>& outputs) {
  const auto op = in_one_dtype(call);
  const auto& [new_o, h] = outputs;
  if (op.shape.T == 0) h.zero_();
  run_prefill(op, state_io(op.q.device(), op.pool, op.state_v_first), op.out.value_or(new_o), h);
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  metal::implement<ChunkGatedDeltaRule, &run>(m);
  metal::implement<ChunkGatedDeltaRuleInPlace, &run_in_place>(m);
  metal::implement<ChunkKda, &run>(m);
  metal::implement<ChunkKdaInPlace, &run_in_place>(m);
}

}  // namespace torch_gdn
