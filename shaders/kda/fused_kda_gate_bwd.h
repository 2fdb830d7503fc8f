#pragma once
#include "core/channel_gate_parameters.h"

GDN_CONSTANT int kKdaGateBwdThreads = 64;  // per threadgroup

struct KdaGateBwdParameters {
  ChannelGateParameters gate;
  RowStrides dy;
  int32_t tokens, heads, channels;  // g [B, T, HV, K]
  int32_t all_tokens, tokens_of_group;
};
