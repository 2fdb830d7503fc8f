// Launches that several ops share. Tensors are checked, allocated and in the form that the kernels read.
#pragma once
#include "metal/gdn/rule_inputs.h"

namespace torch_gdn {

Launch launch_fused_recurrent_gated_delta_rule(const RuleInputs& in, const ChannelDecays& channels,
                                               const StateIo& states, const Tensor& o);
// chunk_size: see fused_chunk_size(); 0: chosen.
Launch launch_fused_chunk_gated_delta_rule(const RuleInputs& in, int64_t chunk_size, const StateIo& states,
                                           const Tensor& o);

Launch launch_chunk_fwd_intra(const RuleInputs& in, const Tensor& g_cumsum, const Tensor& w, const Tensor& u);

struct ChunkFwdHCall {
  ChunkShape<> shape;
  Tensor k, w, u, g_cumsum;
  optional<Tensor> cu_seqlens;
  StateIo states;
  Tensor h, v_new;
  bool has_channel_decays = false;  // g_cumsum [B, NT, HV, K], and k decayed to the end of its chunk
};
Launch launch_chunk_fwd_h(const ChunkFwdHCall& call);

struct ChunkFwdOCall {
  ChunkShape<> shape;
  Tensor q, k, v_new, h, g_cumsum;
  optional<Tensor> cu_seqlens;
  Slots slots;
  bool v_first;
  double scale;
  Tensor o;
  bool has_scores = false;  // [B, T, HV, C] in the place of k, and q decayed
};
Launch launch_chunk_fwd_o(const ChunkFwdOCall& call);

}  // namespace torch_gdn
