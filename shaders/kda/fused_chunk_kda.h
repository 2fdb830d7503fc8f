#pragma once
#include "gdn/fused_chunk_gated_delta_rule.h"
#include "kda/channel_gate_parameters.h"

struct FusedChunkKdaParameters {
  FusedChunkParameters rule;  // its g is absent
  ChannelGateParameters gate;
};
