// Computes the log decay of a key channel from a final or raw g.
#pragma once
#include "core/gates.h"
#include "core/parameters.h"

// The gate parameters of one channel of a head.
struct ChannelGate {
  float rate;  // exp(A_log)
  float bias;
};

METAL_FUNC ChannelGate channel_gate_of(
    device const uchar* A_log,
    device const uchar* dt_bias,
    constant ChannelGateParameters& parameters,
    int64_t head,
    int channel,
    int channels) {
  ChannelGate gate;
  gate.rate = parameters.A_log_type == kAbsent ? 1.0f : gate_exp(read_float(A_log, head, parameters.A_log_type));
  gate.bias = parameters.dt_bias_type == kAbsent || channel >= channels
                  ? 0.0f
                  : read_float(dt_bias, head * channels + channel, parameters.dt_bias_type);
  return gate;
}

METAL_FUNC float channel_log_decay(float x, ChannelGate gate, constant ChannelGateParameters& parameters) {
  if (parameters.kind == kSoftplusGate) return -gate.rate * softplus_of(x + gate.bias);
  if (parameters.kind == kBoundedGate) return parameters.lower_bound * sigmoid_of(gate.rate * (x + gate.bias));
  return x;
}
