#pragma once
#include "core/channel_gate_parameters.h"

struct KdaChunkFwdIntraParameters {
  SequenceParameters sequence;
  GateParameters gates;  // for beta
  ChannelGateParameters channel_gate;
  RowStrides q, k, v;
  HeadGroups heads;
  int32_t value_heads;
};
