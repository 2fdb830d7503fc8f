#pragma once
#include "core/channel_gate_parameters.h"

GDN_CONSTANT int kKdaGateThreads = 256;  // per threadgroup

struct KdaGateParameters {
  ChannelGateParameters gate;
  int32_t tokens, heads, channels;  // g [B, T, HV, K]
};
