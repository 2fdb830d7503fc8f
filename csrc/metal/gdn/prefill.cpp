// The stages of a chunk, each as an op, and prefill by one of three algorithms (launch/prefill.h).
#include "launch/prefill.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "metal/gates.h"
#include "metal/gdn/rule.h"
#include "metal/implement.h"
#include "ops/gdn/chunk_stages.h"
#include "ops/gdn/rules.h"
#include "shaders/gdn/parameters.h"
#include "shaders/kda/parameters.h"

namespace torch_gdn {

namespace {

// The chunks of a prefill. A launch reads some of the tensors, and fills others.
struct Chunks {
  ChunkShape<> shape;
  optional<Tensor> cu_seqlens;
  Tensor q, k;                          // [B, T, H, K]; with log_decays, both include the decay and have HV heads
  Tensor w, u;                          // [B, T, HV, K] and [B, T, HV, V]
  optional<Tensor> g_cumsum;            // [B, T, HV], f32, for one decay per head
  optional<Tensor> log_decays, scores;  // [B, NT, HV, K] of whole chunks and [B, T, HV, C], f32, for decays of channels
  Tensor h, v_new;                      // the state before each chunk, and what each token adds to it
};

// Does not read q and scores.
Launch launch_chunk_fwd_h(const Chunks& chunks, const StateIo& states) {
  const auto& [s, cu_seqlens, q, k, w, u, g_cumsum, log_decays, scores, h, v_new] = chunks;
  ChunkFwdHParameters parameters{};
  parameters.sequence = sequence_parameters(s, cu_seqlens);
  parameters.k = row_strides(k);
  parameters.h = state_strides(h, states.v_first);
  parameters.heads = head_groups(s, k.size(2));
  parameters.value_heads = int32_t(s.HV);
  states.set(parameters);
  return {"gdn/chunk_fwd_h",
          {k.scalar_type(), w.scalar_type(), s.K, s.V, s.C, vector_width({k, w, u}), states.dtype(),
           TemplateArgument::flag(log_decays.has_value())},
          {k, w, u, log_decays.has_value() ? log_decays : g_cumsum, states.bindings(cu_seqlens, parameters, h, v_new)},
          state_threadgroups(s),
          kStateThreads};
}

// Does not read w and u, nor k if there are scores.
Launch launch_chunk_fwd_o(const Chunks& chunks, const Slots& slots, bool v_first, double scale, const Tensor& o) {
  const auto& [s, cu_seqlens, q, k, w, u, g_cumsum, log_decays, scores, h, v_new] = chunks;
  ChunkFwdOParameters parameters{};
  parameters.sequence = sequence_parameters(s, cu_seqlens);
  parameters.slots = slots.parameters;
  parameters.slots.has_flags = 0;  // the kernel reads h, never the pool
  parameters.q = row_strides(q);
  parameters.k = row_strides(k);
  parameters.o = row_strides(o);
  parameters.h = state_strides(h, v_first);
  parameters.heads = head_groups(s, q.size(2));
  parameters.value_heads = int32_t(s.HV);
  parameters.output_is_f32 = o.scalar_type() != q.scalar_type();
  parameters.scale = float(scale);
  const bool has_scores = scores.has_value();
  return {"gdn/chunk_fwd_o",
          {q.scalar_type(), h.scalar_type(), s.K, s.V, s.C, vector_width({q, k, v_new}),
           TemplateArgument::flag(has_scores)},
          {q, has_scores ? Binding() : Binding(k), v_new, h, has_scores ? scores : g_cumsum, cu_seqlens, slots.indices,
           o, Binding::error_log(), parameters},
          {s.NT, s.HV, s.B},
          chunk_threads(int(s.C))};
}

void run(const ChunkLocalCumsum<int64_t>& op, const Tensor& g_cumsum) {
  const auto& s = op.shape;
  const Tensor g = readable(op.g);
  const auto cu_seqlens = index_array(g.device(), op.cu_seqlens);
  const ChunkLocalCumsumParameters parameters{sequence_parameters(s, cu_seqlens), row_strides(g), element_type(g),
                                              int32_t(s.HV)};
  launcher().run({{"gdn/chunk_local_cumsum",
                   {s.C},
                   {g, cu_seqlens, g_cumsum, Binding::error_log(), parameters},
                   {s.NT, ceil_div(s.HV, kCumsumHeads), s.B},
                   kCumsumHeads}});
}

void run(const ChunkScaledDotKkt<int64_t>& op, const Tensor& A) {
  const auto& s = op.shape;
  const Tensor k = unit_last_stride(op.k, "k"), g_cumsum = as_f32(op.g), beta = as_f32(op.beta);
  const auto cu_seqlens = index_array(k.device(), op.cu_seqlens);
  const ChunkScaledDotKktParameters parameters{sequence_parameters(s, cu_seqlens), row_strides(k), head_groups(s),
                                               int32_t(s.HV)};
  launcher().run({{"gdn/chunk_scaled_dot_kkt",
                   {k.scalar_type(), s.K, s.C, vector_width({k})},
                   {k, g_cumsum, beta, cu_seqlens, A, Binding::error_log(), parameters},
                   {s.NT, s.H, s.B},
                   chunk_threads(int(s.C))}});
}

void run(const SolveTril<int64_t>& op, const Tensor& A_inv) {
  const auto& s = op.shape;
  const Tensor A = as_contiguous(op.A, "A");
  const auto cu_seqlens = index_array(A.device(), op.cu_seqlens);
  const SolveTrilParameters parameters{sequence_parameters(s, cu_seqlens), int32_t(s.HV)};
  launcher().run({{"gdn/solve_tril",
                   {s.C},
                   {A, cu_seqlens, A_inv, Binding::error_log(), parameters},
                   {s.NT, s.HV, s.B},
                   chunk_threads(int(s.C))}});
}

void run(const RecomputeWU<int64_t>& op, const std::tuple<Tensor, Tensor>& outputs) {
  const auto& s = op.shape;
  const auto& [w, u] = outputs;
  const Tensor k = unit_last_stride(op.k, "k"), v = unit_last_stride(op.v, "v");
  const Tensor g_cumsum = as_f32(op.g);
  const auto cu_seqlens = index_array(k.device(), op.cu_seqlens);
  const RecomputeWUParameters parameters{sequence_parameters(s, cu_seqlens), row_strides(k), row_strides(v),
                                         head_groups(s), int32_t(s.HV)};
  launcher().run(
      {{"gdn/recompute_w_u",
        {k.scalar_type(), s.K, s.V, s.C, vector_width({k, v})},
        {k, v, as_f32(op.beta), as_contiguous(op.A, "A"), g_cumsum, cu_seqlens, w, u, Binding::error_log(), parameters},
        {s.NT, s.HV, s.B},
        chunk_threads(int(s.C))}});
}

void run(const ChunkFwdH<int64_t>& op, const std::tuple<Tensor, Tensor, Tensor>& outputs) {
  const auto& [h, v_new, final_state] = outputs;
  if (op.shape.T == 0) {
    h.zero_();
    copy_state(op.initial_state, final_state);
    return;
  }
  const Chunks chunks{.shape = op.shape,
                      .cu_seqlens = index_array(op.k.device(), op.cu_seqlens),
                      .k = unit_last_stride(op.k, "k"),
                      .w = as_contiguous(op.w, "w"),
                      .u = as_contiguous(op.u, "u"),
                      .g_cumsum = as_f32(op.g),
                      .h = h,
                      .v_new = v_new};
  launcher().run({launch_chunk_fwd_h(chunks, state_io(op.initial_state, final_state, op.state_v_first))});
}

void run(const ChunkFwdO<int64_t>& op, const Tensor& o) {
  const Chunks chunks{.shape = op.shape,
                      .cu_seqlens = index_array(op.q.device(), op.cu_seqlens),
                      .q = unit_last_stride(op.q, "q"),
                      .k = unit_last_stride(op.k, "k"),
                      .g_cumsum = as_f32(op.g),
                      .h = as_contiguous(op.h, "h"),
                      .v_new = as_contiguous(op.v, "v")};
  launcher().run({launch_chunk_fwd_o(chunks, {}, op.state_v_first, scale_or_default(op.scale, op.shape.K), o)});
}

// The equivalent of FLA's chunk_gated_delta_rule_fwd_intra, together with the cumulative sum before it. It is not an
// op, because FLA's function takes the sum and returns A for its backward pass.
Launch launch_chunk_fwd_intra(const RuleInputs& in, const Chunks& chunks) {
  const auto& s = in.shape;
  const auto& [g, beta, A_log, dt_bias, gates] = in.gates;
  // The value heads of a key head share k k^T, unless that would leave cores without work.
  const bool share = s.NT * s.H * s.B >= busy_threadgroups();
  const int64_t members = share ? s.HV / s.H : 1;
  const ChunkFwdIntraParameters parameters{.sequence = sequence_parameters(s, in.cu_seqlens),
                                           .gates = gates,
                                           .k = row_strides(in.k),
                                           .v = row_strides(in.v),
                                           .heads = head_groups(s),
                                           .value_heads = int32_t(s.HV),
                                           .members = int32_t(members)};
  return {"gdn/chunk_fwd_intra",
          {in.k.scalar_type(), chunks.w.scalar_type(), s.K, s.V, s.C, vector_width({in.k, in.v})},
          {in.k, in.v, *g, *beta, A_log, dt_bias, in.cu_seqlens, chunks.g_cumsum, chunks.w, chunks.u,
           Binding::error_log(), parameters},
          {s.NT, s.HV / members, s.B},
          chunk_threads(int(s.C))};
}

Launch launch_kda_chunk_fwd_intra(const RuleInputs& in, const Chunks& chunks) {
  const auto& s = in.shape;
  const auto& [w, u] = std::tie(chunks.w, chunks.u);
  const KdaChunkFwdIntraParameters parameters{.sequence = sequence_parameters(s, in.cu_seqlens),
                                              .gates = in.gates.parameters,
                                              .channel_gate = in.gk.parameters,
                                              .q = row_strides(in.q),
                                              .k = row_strides(in.k),
                                              .v = row_strides(in.v),
                                              .heads = head_groups(s),
                                              .value_heads = int32_t(s.HV)};
  return {"kda/kda_chunk_fwd_intra",
          {in.q.scalar_type(), w.scalar_type(), s.K, s.V, s.C, vector_width({in.v, w, u})},
          {in.q, in.k, in.v, in.gk.g, in.gates.beta, in.gk.A_log, in.gk.dt_bias, in.cu_seqlens, chunks.q, chunks.k,
           chunks.scores, chunks.log_decays, w, u, Binding::error_log(), parameters},
          {s.NT, s.HV, s.B},
          chunk_threads(int(s.C))};
}

// See fused_chunk_size() and fused_kda_chunk_size() for chunk_size. 0 lets them choose.
Launch launch_fused_chunk_gated_delta_rule(const RuleInputs& in, int64_t chunk_size, const StateIo& states,
                                           const Tensor& o) {
  const auto& s = in.shape;
  auto parameters = in.parameters<FusedChunkParameters>(states, o);
  parameters.has_norm = in.normalise;
  parameters.output_is_f32 = o.scalar_type() != in.q.scalar_type();
  return {"gdn/fused_chunk_gated_delta_rule",
          {in.q.scalar_type(), s.K, fused_chunk_size(s.K, int64_t(in.q.element_size()), chunk_size),
           vector_width({in.q, in.k}), states.dtype()},
          {in.q, in.k, in.v, in.gates.g, in.gates.beta, in.gates.A_log, in.gates.dt_bias,
           states.bindings(in.cu_seqlens, parameters, o)},
          state_threadgroups(s),
          kStateThreads};
}

Launch launch_fused_chunk_kda(const RuleInputs& in, int64_t chunk_size, const StateIo& states, const Tensor& o) {
  const auto& s = in.shape;
  FusedChunkKdaParameters parameters{.rule = in.parameters<FusedChunkParameters>(states, o), .gate = in.gk.parameters};
  parameters.rule.has_norm = in.normalise;
  parameters.rule.output_is_f32 = o.scalar_type() != in.q.scalar_type();
  return {"kda/fused_chunk_kda",
          {in.q.scalar_type(), s.K, fused_kda_chunk_size(s.K, chunk_size), vector_width({in.q, in.k}), states.dtype()},
          {in.q, in.k, in.v, in.gk.g, in.gates.beta, in.gk.A_log, in.gk.dt_bias,
           states.bindings(in.cu_seqlens, parameters, o)},
          state_threadgroups(s),
          kStateThreads};
}

// Chooses the algorithm for sequences of these sizes on this device.
PrefillChoice choose_prefill(const ChunkedRule<int64_t>& op) {
  if (op.return_intermediate_states) return {PrefillAlgorithm::kChunked};  // the others keep states in registers
  const auto& s = op.shape;
  const int64_t sequences = std::max<int64_t>(s.N, 1);
  const int64_t tokens = s.packed ? ceil_div(s.T, sequences) : s.T;
  const auto& device = launcher().device();
  return prefill_algorithm({tokens, sequences * s.HV, s.K, s.V, op.channels.gk.has_value()}, device.name,
                           int64_t(device.core_count));
}

using Rule = ChunkedRule<int64_t>;

// Runs three kernels. The first prepares each chunk separately, the second computes the states between chunks, and the
// third the outputs.
std::vector<Launch> chunked_launches(const Rule& op, const StateIo& states, const Tensor& o, const Tensor& h_output) {
  const auto& s = op.shape;
  auto in = rule_inputs(op);
  std::vector<Launch> launches = normalise_keys(in);
  const auto options = op.intermediate_options(), in_f32 = options.dtype(at::kFloat);
  Chunks chunks{.shape = s,
                .cu_seqlens = in.cu_seqlens,
                .q = in.q,
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
  chunks.v_new = at::empty_like(chunks.u);
  chunks.h = h_output.dim() > 1 ? h_output : at::empty(state_sizes({s.B, s.NT}, s, op.state_v_first), options);
  launches.push_back(launch_chunk_fwd_h(chunks, states));
  launches.push_back(launch_chunk_fwd_o(chunks, states.slots, op.state_v_first, in.scale, o));
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
  metal::implement<ChunkLocalCumsum, &run>(m);
  metal::implement<ChunkScaledDotKkt, &run>(m);
  metal::implement<SolveTril, &run>(m);
  metal::implement<RecomputeWU, &run>(m);
  metal::implement<ChunkFwdH, &run>(m);
  metal::implement<ChunkFwdO, &run>(m);
  metal::implement<ChunkGatedDeltaRule, &run>(m);
  metal::implement<ChunkGatedDeltaRuleInPlace, &run_in_place>(m);
  metal::implement<ChunkKda, &run>(m);
  metal::implement<ChunkKdaInPlace, &run_in_place>(m);
}

}  // namespace torch_gdn
