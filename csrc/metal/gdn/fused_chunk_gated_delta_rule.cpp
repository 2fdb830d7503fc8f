// The fused algorithm of a prefill: one kernel from inputs to outputs.
#include "metal/gdn/rule.h"
#include "metal/prefill.h"

namespace torch_gdn {

Launch launch_chunk_gated_delta_rule(const ChunkShape<>& shape, const Tensor& q, const Tensor& k, const Tensor& v,
                                     const Gates& gates, const StateIo& states, const optional<Tensor>& cu_seqlens,
                                     const RuleOptions& options, int64_t chunk_size, const Tensor& o) {
  auto parameters = rule_parameters<FusedChunkParameters>(shape, q, k, v, gates, states, options, o);
  parameters.has_norm = options.normalise;
  parameters.counted_chunk_size = int32_t(shape.C);
  const auto or_stand = [&](const optional<Tensor>& x) { return or_dummy(x, o); };
  return {"fused_chunk_gated_delta_rule",
          "gdn/fused_chunk_gated_delta_rule.metal",
          {metal_type(q.scalar_type()), std::to_string(shape.K),
           std::to_string(fused_chunk_size(shape.K, int64_t(q.element_size()), chunk_size)), vector_width({q, k}),
           metal_type(states.dtype())},
          {q, k, v, *gates.g, *gates.beta, or_stand(gates.A_log), or_stand(gates.dt_bias), or_stand(states.source),
           or_stand(cu_seqlens), or_stand(states.slots.indices), or_stand(states.slots.flags), o,
           states.target.defined() ? states.target : o, Binding::error_log(), Binding::values(parameters)},
          rule_threadgroups(shape),
          128};
}

}  // namespace torch_gdn
