#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "metal/gdn/launches.h"

namespace torch_gdn {

Launch launch_chunk_fwd_o(const ChunkShape<>& shape, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& h,
                          const Tensor& g, double scale, bool state_v_first, const optional<Tensor>& cu_seqlens,
                          const Slots& slots, const Tensor& o) {
  ChunkFwdOParameters parameters{};
  parameters.sequence = sequence_parameters(shape);
  parameters.slots = slots.parameters;
  parameters.slots.has_flags = 0;  // where a state comes from is done with
  parameters.q = row_strides(q);
  parameters.k = row_strides(k);
  parameters.h = state_strides(h, state_v_first);
  parameters.heads = head_groups(shape);
  parameters.value_heads = int32_t(shape.HV);
  parameters.output_is_f32 = o.scalar_type() != q.scalar_type();
  parameters.scale = float(scale);
  return {"chunk_fwd_o",
          "gdn/chunk_fwd_o.metal",
          {metal_type(q.scalar_type()), metal_type(h.scalar_type()), std::to_string(shape.K), std::to_string(shape.V),
           std::to_string(shape.C), vector_width({q, k})},
          {q, k, v, h, g, or_dummy(cu_seqlens, g), or_dummy(slots.indices, g), o, Binding::values(parameters)},
          {size_t(shape.NT), size_t(shape.HV), size_t(shape.B)},
          size_t(2 * shape.C)};
}

namespace {

Tensor chunk_fwd_o(const Tensor& q_any, const Tensor& k_any, const Tensor& v, const Tensor& h, const Tensor& g,
                   optional<double> scale, bool state_v_first, const optional<Tensor>& cu_seqlens, int64_t chunk_size,
                   const optional<Tensor>& chunk_indices) {
  const auto shape =
      check_chunk_fwd_o(q_any, k_any, v, h, g, scale, state_v_first, cu_seqlens, chunk_size, chunk_indices);
  const auto q = unit_last_stride(q_any, "q"), k = unit_last_stride(k_any, "k");
  const auto o = at::empty({shape.B, shape.T, shape.HV, shape.V}, q.options());
  const auto cu_seqlens = cu_seqlens_on(q.device(), cu_seqlens);
  launcher().run({launch_chunk_fwd_o(shape, q, k, as_contiguous(v, "v"), as_contiguous(h, "h"), as_f32(g),
                                     scale_or_default(scale, shape.K), state_v_first, cu_seqlens, {}, o)});
  return o;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, MPS, m) { m.impl("chunk_fwd_o", chunk_fwd_o); }

}  // namespace torch_gdn
