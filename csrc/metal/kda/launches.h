// What the launches of Kimi Delta Attention take besides the rule's inputs, whose g is absent.
#pragma once
#include "metal/gdn/launches.h"
#include "ops/channel_gate.h"
#include "shaders/kda/fused_chunk_kda.h"

namespace torch_gdn {

// chunk_size: see fused_kda_chunk_size(); 0: chosen.
Launch launch_fused_chunk_kda(const RuleInputs& in, const ChannelGates& gates, int64_t chunk_size,
                              const StateIo& states, const Tensor& o);

// What kda_chunk_fwd_intra makes of a prefill's chunks.
struct KdaChunk {
  Tensor decayed_q, decayed_k;  // [B, T, HV, K], dtype of q
  Tensor scores;                // [B, T, HV, C], f32
  Tensor log_decays;            // [B, NT, HV, K], f32: of whole chunks
  Tensor w, u;                  // [B, T, HV, K] and [B, T, HV, V]
};

Launch launch_kda_chunk_fwd_intra(const RuleInputs& in, const ChannelGates& gates, const KdaChunk& chunk);

}  // namespace torch_gdn
