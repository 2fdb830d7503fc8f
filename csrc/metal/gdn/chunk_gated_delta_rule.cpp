// A prompt in one of three algorithms (prefill.h), encoded at once; what goes from stage to stage lives in PyTorch's
// allocator and dies when the op returns.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

#include "metal/gdn/launches.h"
#include "metal/prefill.h"

namespace torch_gdn {

namespace {

// A state may leave half's range, so with half the stages between are f32.
at::TensorOptions between(const Tensor& q) {
  return q.options().dtype(q.scalar_type() == at::kHalf ? at::kFloat : q.scalar_type());
}

// Returns h.
Tensor run_stages(const ChunkShape<>& shape, Tensor q, Tensor k, const Tensor& v, const Gates& gates,
                  const StateIo& states, const optional<Tensor>& cu_seqlens, const RuleOptions& options,
                  const Tensor& o) {
  const auto activation = q.options(), f32 = q.options().dtype(at::kFloat);
  std::vector<Launch> launches;
  if (options.normalise) {
    const auto unit_q = at::empty(q.sizes(), activation), unit_k = at::empty(k.sizes(), activation);
    launches.push_back(launch_l2norm(q, 1e-6, unit_q));
    launches.push_back(launch_l2norm(k, 1e-6, unit_k));
    q = unit_q;
    k = unit_k;
  }
  const auto g_cumsum = at::empty({shape.B, shape.T, shape.HV}, f32);
  const auto w = at::empty({shape.B, shape.T, shape.HV, shape.K}, between(q));
  const auto u = at::empty({shape.B, shape.T, shape.HV, shape.V}, between(q)), v_new = at::empty_like(u);
  const auto h = at::empty(chunk_state_shape(shape, options.state_v_first), between(q));

  launches.push_back(launch_chunk_fwd_intra(shape, k, v, gates, cu_seqlens, g_cumsum, w, u));
  launches.push_back(launch_chunk_fwd_h(shape, k, w, u, g_cumsum, states, options.state_v_first, cu_seqlens, h, v_new));
  launches.push_back(launch_chunk_fwd_o(shape, q, k, v_new, h, g_cumsum, options.scale, options.state_v_first, cu_seqlens,
                                        states.slots, o));
  launcher().run(launches);
  return h;
}

// Only stages leave the state before each chunk in memory.
PrefillChoice choice_of(const ChunkShape<>& shape, bool return_intermediate_states) {
  if (return_intermediate_states) return {PrefillAlgorithm::kChunked};
  const int64_t sequences = std::max<int64_t>(shape.N, 1);
  const int64_t tokens = shape.packed ? ceil_div(shape.T, sequences) : shape.T;
  static const DeviceFacts device = launcher().device();
  return prefill_algorithm({tokens, sequences * shape.HV, shape.K, shape.V}, device.name, int64_t(device.core_count));
}

// Returns h; of an algorithm without stages, an empty one.
Tensor run(const ChunkShape<>& shape, const Tensor& q_any, const Tensor& k_any, const Tensor& v_any, const Gates& gates,
           const StateIo& states, const optional<Tensor>& cu_seqlens, const RuleOptions& options, PrefillChoice choice,
           const Tensor& o) {
  const auto q = unit_last_stride(q_any, "q"), k = unit_last_stride(k_any, "k"), v = unit_last_stride(v_any, "v");
  if (choice.algorithm == PrefillAlgorithm::kChunked)
    return run_stages(shape, q, k, v, gates, states, cu_seqlens, options, o);
  launcher().run(
      {choice.algorithm == PrefillAlgorithm::kFusedChunk
           ? launch_chunk_gated_delta_rule(shape, q, k, v, gates, states, cu_seqlens, options, choice.chunk_size, o)
           : launch_fused_recurrent_gated_delta_rule(shape, q, k, v, gates, Channels(), states, cu_seqlens, options, o)});
  return at::empty({0}, between(q));
}

std::tuple<Tensor, Tensor, Tensor> chunk_gated_delta_rule(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta, optional<double> scale,
    const optional<Tensor>& initial_state, bool output_final_state, bool use_qk_l2norm_in_kernel, bool state_v_first,
    const optional<Tensor>& cu_seqlens, const optional<Tensor>& chunk_indices, int64_t chunk_size,
    bool use_gate_in_kernel, const optional<Tensor>& A_log, const optional<Tensor>& dt_bias,
    bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, optional<at::ScalarType> output_dtype,
    std::string_view head_grouping, bool return_intermediate_states) {
  const GateOptions gates{use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval};
  const optional<Tensor> some_g = g, some_beta = beta;
  const EndToEndOp op{"chunk_gated_delta_rule", q, k, v, some_g, some_beta, gates, output_dtype, head_grouping};
  const auto shape =
      check_chunk_gated_delta_rule(op, initial_state, state_v_first, cu_seqlens, chunk_indices, chunk_size);
  const auto nothing = at::empty({0}, q.options().dtype(at::kFloat));
  const auto o = at::empty({shape.B, shape.T, shape.HV, shape.V}, q.options().dtype(output_dtype_of(op)));
  if (shape.T == 0) {
    const auto h = at::zeros(chunk_state_shape(shape, state_v_first), between(q));
    return {o, output_final_state ? copied_state(shape, q, initial_state, state_v_first) : nothing,
            return_intermediate_states ? h : at::empty({0}, h.options())};
  }
  const auto final_state = output_final_state ? empty_state(shape, q, state_v_first) : Tensor();
  const RuleOptions options{use_qk_l2norm_in_kernel, state_v_first, scale_or_default(scale, shape.K)};
  const auto h = run(shape, q, k, v, gates_of(g, beta, gates),
                     {.source = state_as_f32(initial_state), .target = final_state, .slots = {}},
                     cu_seqlens_on(q.device(), cu_seqlens), options, choice_of(shape, return_intermediate_states), o);
  return {o, output_final_state ? final_state : nothing, return_intermediate_states ? h : at::empty({0}, h.options())};
}

// Without a token: a slot whose sequence starts anew becomes zeros.
Tensor reset_states(const ChunkShape<>& shape, const Tensor& q, const StateIo& states, const RuleOptions& options) {
  const auto nothing = at::empty({shape.B, 0, shape.HV, shape.V}, between(q));
  const auto no_keys = at::empty({shape.B, 0, shape.HV, shape.K}, between(q));
  const auto no_gates = at::empty({shape.B, 0, shape.HV}, q.options().dtype(at::kFloat));
  const auto h = at::zeros(chunk_state_shape(shape, options.state_v_first), between(q));
  auto batch = shape;  // N sequences of no tokens
  batch.packed = false;
  batch.NT = 0;
  launcher().run({launch_chunk_fwd_h(batch, q, no_keys, nothing, no_gates, states, options.state_v_first, std::nullopt,
                                     nothing, nothing)});
  return h;
}

std::tuple<Tensor, Tensor> chunk_gated_delta_rule_(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta, const Tensor& state_pool,
    const optional<Tensor>& state_indices, const optional<Tensor>& has_initial_state, int64_t null_index,
    optional<double> scale, bool use_qk_l2norm_in_kernel, bool state_v_first, const optional<Tensor>& cu_seqlens,
    const optional<Tensor>& chunk_indices, int64_t chunk_size, bool use_gate_in_kernel, const optional<Tensor>& A_log,
    const optional<Tensor>& dt_bias, bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval,
    optional<at::ScalarType> output_dtype, std::string_view head_grouping, bool return_intermediate_states) {
  const GateOptions gates{use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval};
  const optional<Tensor> some_g = g, some_beta = beta;
  const Pool pool{state_pool, state_indices, has_initial_state, null_index, state_v_first};
  const EndToEndOp op{"chunk_gated_delta_rule_", q, k, v, some_g, some_beta, gates, output_dtype, head_grouping};
  const auto shape = check_chunk_gated_delta_rule_(op, pool, cu_seqlens, chunk_indices, chunk_size);
  const auto o = at::empty({shape.B, shape.T, shape.HV, shape.V}, q.options().dtype(output_dtype_of(op)));
  const RuleOptions options{use_qk_l2norm_in_kernel, state_v_first, scale_or_default(scale, shape.K)};
  const auto states = in_place(q.device(), pool);
  const auto h = shape.T == 0
                     ? reset_states(shape, q, states, options)
                     : run(shape, q, k, v, gates_of(g, beta, gates), states, cu_seqlens_on(q.device(), cu_seqlens),
                           options, choice_of(shape, return_intermediate_states), o);
  return {o, return_intermediate_states ? h : at::empty({0}, h.options())};
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) {
  m.impl("chunk_gated_delta_rule", chunk_gated_delta_rule);
  m.impl("chunk_gated_delta_rule_", chunk_gated_delta_rule_);
}

}  // namespace torch_gdn
