// The launches of the chunk stages, so that an op of several stages encodes them in one go. Each takes tensors that
// were checked and allocated; `cu_seqlens` is contiguous int64 on their device, or absent.
#pragma once
#include "metal/gates.h"
#include "metal/slots.h"

namespace torch_gdn {

// Where states are read and written: one tensor for each, a state a sequence; or a pool, which is both.
struct StateIo {
  optional<Tensor> source;
  Tensor target;  // undefined: not asked for
  Slots slots;

  at::ScalarType dtype() const {
    return source.has_value() ? source->scalar_type() : target.defined() ? target.scalar_type() : at::kFloat;
  }
};

inline StateIo in_place(at::Device device, const Pool& pool) {
  return {pool.states, pool.states, slots_on(device, pool.states, pool.indices, pool.has_state, pool.null_index)};
}

// Of both end-to-end ops.
struct RuleOptions {
  bool normalise, state_v_first;
  double scale;
};

// What is done within each chunk: cumulative g, w and u.
Launch launch_chunk_fwd_intra(const ChunkShape<>& shape, const Tensor& k, const Tensor& v, const Gates& gates,
                              const optional<Tensor>& cu_seqlens, const Tensor& g_cumsum, const Tensor& w, const Tensor& u);
Launch launch_chunk_fwd_h(const ChunkShape<>& shape, const Tensor& k, const Tensor& w, const Tensor& u, const Tensor& g,
                          const StateIo& states, bool state_v_first, const optional<Tensor>& cu_seqlens,
                          const Tensor& h, const Tensor& v_new);
Launch launch_chunk_fwd_o(const ChunkShape<>& shape, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& h,
                          const Tensor& g, double scale, bool state_v_first, const optional<Tensor>& cu_seqlens,
                          const Slots& slots, const Tensor& o);
Launch launch_chunk_gated_delta_rule(const ChunkShape<>& shape, const Tensor& q, const Tensor& k, const Tensor& v,
                                     const Gates& gates, const StateIo& states, const optional<Tensor>& cu_seqlens,
                                     const RuleOptions& options, int64_t chunk_size, const Tensor& o);
Launch launch_fused_recurrent_gated_delta_rule(const ChunkShape<>& shape, const Tensor& q, const Tensor& k,
                                               const Tensor& v, const Gates& gates, const Channels& channels,
                                               const StateIo& states, const optional<Tensor>& cu_seqlens,
                                               const RuleOptions& options, const Tensor& o);
Launch launch_l2norm(const Tensor& x, double eps, const Tensor& y);  // x: [B, T, H, D]

}  // namespace torch_gdn
