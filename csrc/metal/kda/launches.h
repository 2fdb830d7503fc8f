// What the launches of Kimi Delta Attention take besides the rule's inputs, whose g is absent.
#pragma once
#include "metal/gdn/launches.h"
#include "ops/channel_gate.h"
#include "shaders/kda/fused_chunk_kda.h"

namespace torch_gdn {

// g [B, T, HV, K], final or raw.
struct ChannelGates {
  Tensor g;
  optional<Tensor> A_log, dt_bias;
  ChannelGateParameters parameters{};
};

ChannelGates channel_gates_of(const Tensor& g, const ChannelGateOptions& options);

// chunk_size: see fused_kda_chunk_size(); 0: chosen.
Launch launch_fused_chunk_kda(const RuleInputs& in, const ChannelGates& gates, int64_t chunk_size,
                              const StateIo& states, const Tensor& o);

}  // namespace torch_gdn
