#pragma once
#include "core/channel_gate_parameters.h"
#include "gdn/fused_chunk_gated_delta_rule.h"

struct FusedChunkKdaParameters {
  FusedChunkParameters rule;  // its field for g is absent
  ChannelGateParameters gate;
};
