// What the kernels of Kimi Delta Attention share with their hosts.
#pragma once
#include "gdn/parameters.h"

struct KdaChunkFwdIntraParameters {
  SequenceParameters sequence;
  GateParameters gates;  // for beta
  ChannelGateParameters channel_gate;
  RowStrides q, k, v;
  HeadGroups heads;
  int32_t value_heads;
};

struct FusedChunkKdaParameters {
  FusedChunkParameters rule;  // its field for g is absent
  ChannelGateParameters gate;
};

GDN_CONSTANT int kKdaGateThreads = 256;  // per threadgroup

struct KdaGateParameters {
  ChannelGateParameters gate;
  int32_t tokens, heads, channels;  // g [B, T, HV, K]
};

GDN_CONSTANT int kKdaGateBwdThreads = 64;  // per threadgroup

struct KdaGateBwdParameters {
  ChannelGateParameters gate;
  RowStrides dy;
  int32_t tokens, heads, channels;  // g [B, T, HV, K]
  int32_t all_tokens, tokens_of_group;
};
