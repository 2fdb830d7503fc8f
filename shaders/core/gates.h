// Reads g and beta of any float dtype, final or raw, and computes the gates. The results are accurate to about 1 ulp
// because the code avoids Metal's exp and log, which may be off by 4 ulp each.
#pragma once
#include <metal_stdlib>

#include "core/elements.h"
#include "core/exponential.h"
#include "core/fragment.h"
#include "core/parameters.h"
#include "core/rows.h"
using namespace metal;

// log(1 + y) = 2 atanh(s) with s = y / (2 + y), for 0 <= y <= 1. The truncation error is 1e-9.
METAL_FUNC float log_of_one_plus(float y) {
  const float s = y / (2.0f + y);
  const float square = s * s;
  float series = 1.0f / 15.0f;
  series = fma(series, square, 1.0f / 13.0f);
  series = fma(series, square, 1.0f / 11.0f);
  series = fma(series, square, 1.0f / 9.0f);
  series = fma(series, square, 1.0f / 7.0f);
  series = fma(series, square, 1.0f / 5.0f);
  series = fma(series, square, 1.0f / 3.0f);
  return fma(series * square, 2.0f * s, 2.0f * s);
}

// Computes log(1 + exp(x)). The result equals x from 17 on, so FLA's threshold of 20 needs no branch.
METAL_FUNC float softplus_of(float x) { return max(x, 0.0f) + log_of_one_plus(gate_exp(-fabs(x))); }

METAL_FUNC float sigmoid_of(float x) { return 1.0f / (1.0f + gate_exp(-x)); }

// Passes NaN on.
METAL_FUNC float clamped_log_decay(float g) { return g < kLowestLogDecay ? kLowestLogDecay : g; }

METAL_FUNC float log_decay_from_raw(float x, float A_log) { return -gate_exp(A_log) * softplus_of(x); }

METAL_FUNC uint
gate_bits_at(device const uchar* g, constant GateParameters& gates, int64_t batch, int64_t token, int64_t head) {
  return gates.g_type == kAbsent ? 0u : read_bits(g, offset_of(gates.g, batch, token, head), gates.g_type);
}

// The parameters of a head's gate. They are read once for all tokens.
struct HeadGate {
  float A_log, bias;
  bool is_raw;  // if false, g is the log decay
};

METAL_FUNC HeadGate
head_gate_of(device const uchar* A_log, device const uchar* dt_bias, constant GateParameters& gates, int64_t head) {
  if (gates.A_log_type == kAbsent) return {0.0f, 0.0f, false};
  const float bias = gates.dt_bias_type != kAbsent ? read_float(dt_bias, head, gates.dt_bias_type) : 0.0f;
  return {read_float(A_log, head, gates.A_log_type), bias, true};
}

METAL_FUNC float log_decay_of(float raw_gate, HeadGate gate) {
  return gate.is_raw ? log_decay_from_raw(raw_gate + gate.bias, gate.A_log) : raw_gate;
}

METAL_FUNC float log_decay_of_bits(
    uint bits, device const uchar* A_log, device const uchar* dt_bias, constant GateParameters& gates, int64_t head) {
  if (gates.g_type == kAbsent) return 0.0f;
  return log_decay_of(float_of_bits(bits, gates.g_type), head_gate_of(A_log, dt_bias, gates, head));
}

// Reads beta [B, T, HV], or beta [B, T, HV, V] if a column is given.
METAL_FUNC uint beta_bits_at(
    device const uchar* beta,
    constant GateParameters& gates,
    int64_t batch,
    int64_t token,
    int64_t head,
    int64_t column = 0) {
  if (gates.beta_type == kAbsent) return 0u;
  return read_bits(beta, offset_of(gates.beta, batch, token, head) + column, gates.beta_type);
}

METAL_FUNC float beta_of(float raw_beta, constant GateParameters& gates) {
  return gates.beta_scale == 0.0f ? raw_beta : gates.beta_scale * sigmoid_of(raw_beta);
}

METAL_FUNC float beta_of_bits(uint bits, constant GateParameters& gates) {
  if (gates.beta_type == kAbsent) return 1.0f;
  return beta_of(float_of_bits(bits, gates.beta_type), gates);
}

METAL_FUNC float beta_at(
    device const uchar* beta, constant GateParameters& gates, int64_t batch, int64_t token, int64_t head) {
  return beta_of_bits(beta_bits_at(beta, gates, batch, token, head), gates);
}

// Sums lanes 0 to `Lanes` - 1 in their order, starting from `carried`. The exponent of a decay is the difference of two
// such sums. The difference keeps most digits if the later sum continues from the earlier one.
// simd_prefix_inclusive_sum adds in the device's own order; the order of a tree triples the error. Every lane of the
// simdgroup must call this.
template <int Lanes>
METAL_FUNC float running_sum(float carried, float x, uint lane) {
  float sum = carried;
  UNROLL for (int from = 0; from < Lanes; ++from) {
    const float other = simd_shuffle(x, ushort(from));
    sum += from <= int(lane) ? other : 0.0f;
  }
  return sum;
}

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
  const bool has_bias = parameters.dt_bias_type != kAbsent && channel < channels;
  return {
      parameters.A_log_type == kAbsent ? 1.0f : gate_exp(read_float(A_log, head, parameters.A_log_type)),
      has_bias ? read_float(dt_bias, head * channels + channel, parameters.dt_bias_type) : 0.0f};
}

METAL_FUNC float channel_log_decay(float x, ChannelGate gate, constant ChannelGateParameters& parameters) {
  if (parameters.kind == kSoftplusGate) return -gate.rate * softplus_of(x + gate.bias);
  if (parameters.kind == kBoundedGate) return parameters.lower_bound * sigmoid_of(gate.rate * (x + gate.bias));
  return x;
}
