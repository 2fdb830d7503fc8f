#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "launches.h"

namespace torch_gdn {

namespace {

// The layout of a state that exists, else that of the one to be written: it decides how the kernel moves it.
bool value_is_inner(const optional<Tensor>& initial_state, bool state_v_first) {
  if (!initial_state.has_value()) return !state_v_first;
  const auto strides = state_strides(*initial_state, state_v_first);
  return strides.value <= strides.key;
}

Launch launch_fused_recurrent(const ChunkShape& shape, const Tensor& q, const Tensor& k, const Tensor& v,
                              const Tensor& g, const Tensor& beta, double scale, const optional<Tensor>& initial_state,
                              bool normalise, bool state_v_first, const optional<Tensor>& bounds, const Tensor& o,
                              const Tensor& final_state) {
  RecurrentParameters parameters{};
  parameters.sequence = sequence_parameters(shape);
  parameters.q = row_strides(q);
  parameters.k = row_strides(k);
  parameters.v = row_strides(v);
  parameters.value_heads = int32_t(shape.HV);
  parameters.ratio = int32_t(shape.HV / shape.H);
  parameters.value_size = int32_t(shape.V);
  parameters.scale = float(scale);
  if (initial_state.has_value()) {
    parameters.initial_state = state_strides(*initial_state, state_v_first);
    parameters.has_initial_state = 1;
  }
  if (final_state.defined()) {
    parameters.final_state = state_strides(final_state, state_v_first);
    parameters.has_final_state = 1;
  }
  return {"fused_recurrent_gated_delta_rule",
          "gdn/fused_recurrent_gated_delta_rule.metal",
          {metal_type(q.scalar_type()), std::to_string(shape.K),
           value_is_inner(initial_state, state_v_first) ? "true" : "false", normalise ? "true" : "false"},
          {q, k, v, g, beta, or_stand_in(initial_state, g), or_stand_in(bounds, g), o,
           final_state.defined() ? final_state : o, Binding::error_log(), Binding::values(parameters)},
          {size_t(ceil_div(shape.V, 32)), size_t(shape.HV), size_t(shape.N)},
          128};
}

std::tuple<Tensor, Tensor> fused_recurrent_gated_delta_rule(const Tensor& q_any, const Tensor& k_any,
                                                            const Tensor& v_any, const Tensor& g, const Tensor& beta,
                                                            optional<double> scale,
                                                            const optional<Tensor>& initial_state,
                                                            bool output_final_state, bool use_qk_l2norm_in_kernel,
                                                            bool state_v_first, const optional<Tensor>& cu_seqlens) {
  const auto shape =
      check_fused_recurrent_gated_delta_rule(q_any, k_any, v_any, g, beta, scale, initial_state, output_final_state,
                                             use_qk_l2norm_in_kernel, state_v_first, cu_seqlens);
  const auto q = unit_last_stride(q_any, "q"), k = unit_last_stride(k_any, "k"), v = unit_last_stride(v_any, "v");
  const auto f32 = q.options().dtype(at::kFloat);
  const auto o = at::empty({shape.B, shape.T, shape.HV, shape.V}, q.options());
  if (shape.T == 0) {
    return {o, output_final_state ? copied_state(shape, q, initial_state, state_v_first) : at::empty({0}, f32)};
  }
  const auto final_state = output_final_state ? empty_state(shape, q, state_v_first) : Tensor();
  const auto bounds = sequence_bounds(cu_seqlens, q.device());
  launcher().run(
      {launch_fused_recurrent(shape, q, k, v, as_f32(g), as_f32(beta), scale_or_default(scale, shape.K), initial_state,
                              use_qk_l2norm_in_kernel, state_v_first, bounds, o, final_state)});
  return {o, final_state.defined() ? final_state : at::empty({0}, f32)};
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { m.impl("fused_recurrent_gated_delta_rule", fused_recurrent_gated_delta_rule); }

}  // namespace torch_gdn
