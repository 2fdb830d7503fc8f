#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "metal/gdn/launches.h"

namespace torch_gdn {

Launch launch_chunk_fwd_h(const ChunkShape<>& shape, const Tensor& k, const Tensor& w, const Tensor& u, const Tensor& g,
                          const StateIo& states, bool state_v_first, const optional<Tensor>& cu_seqlens,
                          const Tensor& h, const Tensor& v_new) {
  ChunkFwdHParameters parameters{};
  parameters.sequence = sequence_parameters(shape);
  parameters.k = row_strides(k);
  parameters.h = state_strides(h, state_v_first);
  parameters.heads = head_groups(shape);
  parameters.value_heads = int32_t(shape.HV);
  parameters.slots = states.slots.parameters;
  if (states.source.has_value()) {
    parameters.initial_state = state_strides(*states.source, state_v_first);
    parameters.has_initial_state = 1;
  }
  if (states.target.defined()) {
    parameters.final_state = state_strides(states.target, state_v_first);
    parameters.has_final_state = 1;
  }
  // Without a token only a pool is written to, and is bound where nothing is read.
  const auto bound = [&](const Tensor& x) { return x.numel() > 0 ? x : or_dummy({}, states.target); };
  return {
      "chunk_fwd_h",
      "gdn/chunk_fwd_h.metal",
      {metal_type(k.scalar_type()), metal_type(w.scalar_type()), std::to_string(shape.K), std::to_string(shape.V),
       std::to_string(shape.C), vector_width({k, w}), metal_type(states.dtype())},
      {bound(k), bound(w), bound(u), bound(g), bound(or_dummy(states.source, g)), bound(or_dummy(cu_seqlens, g)),
       bound(or_dummy(states.slots.indices, g)), bound(or_dummy(states.slots.flags, g)), bound(h), bound(v_new),
       states.target.defined() ? states.target : h, Binding::error_log(), Binding::values(parameters)},
      {size_t(ceil_div(shape.V, 32)), size_t(shape.HV), size_t(shape.N)},
      128};
}

namespace {

std::tuple<Tensor, Tensor, Tensor> chunk_fwd_h(const Tensor& k_any, const Tensor& w, const Tensor& u, const Tensor& g,
                                               const optional<Tensor>& state_any, bool output_final_state,
                                               int64_t chunk_size, bool state_v_first,
                                               const optional<Tensor>& cu_seqlens,
                                               const optional<Tensor>& chunk_indices) {
  const auto shape = check_chunk_fwd_h(k_any, w, u, g, state_any, output_final_state, chunk_size, state_v_first,
                                       cu_seqlens, chunk_indices);
  const auto k = unit_last_stride(k_any, "k");
  const auto initial_state = state_as_f32(state_any);
  const auto h = at::empty(chunk_state_shape(shape, state_v_first), k.options());
  const auto v_new = at::empty({shape.B, shape.T, shape.HV, shape.V}, k.options());
  if (shape.T == 0) {
    const auto final_state = output_final_state ? copied_state(shape, k, initial_state, state_v_first)
                                                : at::empty({0}, k.options().dtype(at::kFloat));
    return {h.zero_(), v_new, final_state};
  }
  const auto final_state = output_final_state ? empty_state(shape, k, state_v_first) : Tensor();
  const auto cu_seqlens = cu_seqlens_on(k.device(), cu_seqlens);
  launcher().run({launch_chunk_fwd_h(shape, k, as_contiguous(w, "w"), as_contiguous(u, "u"), as_f32(g),
                                     {.source = initial_state, .target = final_state, .slots = {}}, state_v_first,
                                     cu_seqlens, h, v_new)});
  return {h, v_new, final_state.defined() ? final_state : at::empty({0}, k.options().dtype(at::kFloat))};
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { m.impl("chunk_fwd_h", chunk_fwd_h); }

}  // namespace torch_gdn
