// Of FLA's chunk_gated_delta_rule_fwd_intra, and the cumulative sum before it. No op of its own: FLA's takes the sum
// and returns A for its backward pass; the stage ops give each by itself.
#include "metal/gdn/launches.h"

namespace torch_gdn {

namespace {

// The value heads of a key head share k k^T; but below 3 threadgroups for each of an M Max's 40 cores, each gets one.
int64_t members_together(const ChunkShape<>& shape) {
  return shape.NT * shape.H * shape.B >= 120 ? shape.HV / shape.H : 1;
}

}  // namespace

Launch launch_chunk_fwd_intra(const ChunkShape<>& shape, const Tensor& k, const Tensor& v, const Gates& gates,
                              const optional<Tensor>& cu_seqlens, const Tensor& g_cumsum, const Tensor& w,
                              const Tensor& u) {
  const int64_t members = members_together(shape);
  const ChunkFwdIntraParameters parameters{sequence_parameters(shape), gates.parameters,  row_strides(k),  row_strides(v),
                                   head_groups(shape),         int32_t(shape.HV), int32_t(members)};
  return {"chunk_fwd_intra",
          "gdn/chunk_fwd_intra.metal",
          {metal_type(k.scalar_type()), metal_type(w.scalar_type()), std::to_string(shape.K), std::to_string(shape.V),
           std::to_string(shape.C), vector_width({k, v})},
          {k, v, *gates.g, *gates.beta, or_dummy(gates.A_log, g_cumsum), or_dummy(gates.dt_bias, g_cumsum),
           or_dummy(cu_seqlens, g_cumsum), g_cumsum, w, u, Binding::error_log(), Binding::values(parameters)},
          {size_t(shape.NT), size_t(shape.HV / members), size_t(shape.B)},
          size_t(2 * shape.C)};
}

}  // namespace torch_gdn
