// Launches that several ops share. Tensors must be checked and allocated, and must have the form that the kernels read.
#pragma once
#include "metal/gdn/rule_inputs.h"

namespace torch_gdn {

Launch launch_fused_recurrent_gated_delta_rule(const RuleInputs& in, const StateIo& states, const Tensor& o);
// See fused_chunk_size() and fused_kda_chunk_size() for chunk_size. 0 lets them choose.
Launch launch_fused_chunk_gated_delta_rule(const RuleInputs& in, int64_t chunk_size, const StateIo& states,
                                           const Tensor& o);
Launch launch_fused_chunk_kda(const RuleInputs& in, int64_t chunk_size, const StateIo& states, const Tensor& o);

// The prepared chunks of a prefill.
struct Chunks {
  Tensor q, k;                          // [B, T, H, K]; with log_decays, both include the decay and have HV heads
  Tensor w, u;                          // [B, T, HV, K] and [B, T, HV, V]
  optional<Tensor> g_cumsum;            // [B, T, HV], f32, for one decay per head
  optional<Tensor> log_decays, scores;  // [B, NT, HV, K] of whole chunks and [B, T, HV, C], f32, for decays of channels
};
// These functions fill the fields that are not inputs.
Launch launch_chunk_fwd_intra(const RuleInputs& in, const Chunks& chunks);
Launch launch_kda_chunk_fwd_intra(const RuleInputs& in, const Chunks& chunks);

struct ChunkFwdHCall {
  ChunkShape<> shape;
  Chunks chunks;  // q and scores are not read
  optional<Tensor> cu_seqlens;
  StateIo states;
  Tensor h, v_new;
};
Launch launch_chunk_fwd_h(const ChunkFwdHCall& call);

struct ChunkFwdOCall {
  ChunkShape<> shape;
  Chunks chunks;  // w and u are not read, nor is k if there are scores
  Tensor v_new, h;
  optional<Tensor> cu_seqlens;
  Slots slots;
  bool v_first;
  double scale;
  Tensor o;
};
Launch launch_chunk_fwd_o(const ChunkFwdOCall& call);

}  // namespace torch_gdn
